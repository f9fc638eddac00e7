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

extern "C" int masked_weight(void* out, const void* weight, const void* pretrained, const void* scale, int64_t numel,
                             int64_t in_features, int dtype, bool pretrained_bfloat16, int n) {
  return launch_masked_weight({out, weight, pretrained, scale, numel, in_features,
                               static_cast<proxsparse::Dtype>(dtype), pretrained_bfloat16, n},
                              nullptr);
}

extern "C" int gemv(const void* x, const void* values, const uint8_t* indices, const void* scales, const void* bias,
                    void* y, int rows, int out_features, int in_features, int dtype, int codes, int warps, int splits,
                    int tiles, bool dependent, int processors, int generation, int code) {
  emulated::processors = processors, emulated::generation = generation, emulated::code = code;
  return launch_gemv(
      {x, values, indices, bias, y, rows, out_features, in_features, static_cast<proxsparse::Dtype>(dtype), warps,
       splits, tiles, dependent, static_cast<proxsparse::Codes>(codes), scales},
      nullptr);
}

// threads of a thread block, thread blocks, thread blocks of a cluster, programmatic dependence: of the latest launch
extern "C" void launched(int* numbers) {
  const auto& launch = emulated::launched;
  numbers[0] = launch.threads, numbers[1] = launch.blocks, numbers[2] = launch.cluster, numbers[3] = launch.dependent;
}

extern "C" int pack(void* weight, void* values, uint8_t* indices, int* infeasible, int64_t rows, int in_features,
                    int bytes_of_weight) {
  const proxsparse::PackCall call{weight, values, indices, rows, in_features};
  return infeasible ? launch_pack(call, bytes_of_weight, infeasible, nullptr)
                    : launch_unpack(call, bytes_of_weight, nullptr);
}

extern "C" int metadata(const uint8_t* indices, uint8_t* metadata, int out_features, int in_features,
                        int architecture) {
  return launch_metadata({indices, metadata, out_features, in_features, architecture}, nullptr);
}
