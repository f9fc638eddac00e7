// The launchers as C functions, for ctypes.
#include <cmath>

#include "../../../csrc/cuda/launch.h"

using namespace proxsparse::gpu;

extern "C" int prox(void* weight, int64_t numel, int64_t in_features, const void* scale, int dtype, double reg_lambda,
                    int n) {
  return launch_prox({weight, scale, numel, in_features, static_cast<proxsparse::Dtype>(dtype), reg_lambda, n},
                     nullptr);
}

extern "C" int adamw_prox(void* weight, const void* grad, void* exp_avg, void* exp_avg_sq, void* master,
                          const void* pretrained, const void* scale, int64_t numel, int64_t in_features, int dtype,
                          bool moments_bfloat16, int64_t step, double lr, double beta1, double beta2, double eps,
                          double weight_decay, double reg_lambda, int n, double frozen_lambda, double frozen_eps,
                          bool stochastic, uint64_t seed) {
  proxsparse::AdamWProxCall call{};
  call.weight = weight, call.grad = grad, call.exp_avg = exp_avg, call.exp_avg_sq = exp_avg_sq;
  call.master = master, call.pretrained = frozen_lambda > 0 ? pretrained : nullptr, call.scale = scale;
  call.numel = numel, call.in_features = in_features;
  call.dtype = static_cast<proxsparse::Dtype>(dtype), call.moments_bfloat16 = moments_bfloat16;
  call.lr = lr, call.beta1 = beta1, call.beta2 = beta2, call.eps = eps, call.decay = 1 - lr * weight_decay;
  call.correction1 = 1 / (1 - std::pow(beta1, step)), call.correction2 = 1 / std::sqrt(1 - std::pow(beta2, step));
  call.reg_lambda = reg_lambda, call.n = n;
  call.frozen_lambda = frozen_lambda, call.frozen_eps = frozen_eps;
  call.stochastic = stochastic, call.seed = seed;
  return launch_adamw_prox(call, nullptr);
}
