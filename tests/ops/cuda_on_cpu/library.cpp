// The launchers as C functions, for ctypes.
#include "../../../csrc/cuda/launch.h"

using namespace proxsparse::gpu;

extern "C" int prox(void* weight, int64_t size, int64_t in_features, const void* scale, int type, double reg_lambda,
                    int n) {
  return launch_prox({weight, size, in_features, scale, static_cast<Type>(type), reg_lambda, n}, nullptr);
}

extern "C" int adamw_prox(void* weight, const void* grad, void* exp_avg, void* exp_avg_sq, void* master,
                          const void* pretrained, const void* scale, int64_t size, int64_t in_features, int type,
                          bool moments_bfloat16, int64_t step, double lr, double beta1, double beta2, double eps,
                          double weight_decay, double reg_lambda, int n, double frozen_lambda, double frozen_eps,
                          bool stochastic, uint64_t seed) {
  AdamWProxCall call{};
  call.weight = weight, call.grad = grad, call.exp_avg = exp_avg, call.exp_avg_sq = exp_avg_sq;
  call.master = master, call.pretrained = pretrained, call.scale = scale;
  call.size = size, call.in_features = in_features;
  call.type = static_cast<Type>(type), call.moments_bfloat16 = moments_bfloat16;
  call.step = step, call.lr = lr, call.beta1 = beta1, call.beta2 = beta2, call.eps = eps;
  call.weight_decay = weight_decay, call.reg_lambda = reg_lambda, call.n = n;
  call.frozen_lambda = frozen_lambda, call.frozen_eps = frozen_eps;
  call.stochastic = stochastic, call.seed = seed;
  return launch_adamw_prox(call, nullptr);
}
