// The fused step on the CPU: checks and threads.
#include <ATen/Parallel.h>

#include "../ops.h"
#include "kernels.h"

namespace proxsparse {

constexpr int64_t kChunksPerTask = 8;  // about 10 us of work: a few times the cost of waking a thread

void adamw_prox_(const at::Tensor& weight, const at::Tensor& grad, const at::Tensor& exp_avg,
                 const at::Tensor& exp_avg_sq, const OptionalTensor& master, const OptionalTensor& scale, int64_t step,
                 double lr, double beta1, double beta2, double eps, double weight_decay, double reg_lambda, int64_t m,
                 std::optional<int64_t> seed) {
  const AdamWProxCall call = checked_adamw_prox(at::kCPU, weight, grad, exp_avg, exp_avg_sq, master, scale, step, lr,
                                                beta1, beta2, eps, weight_decay, reg_lambda, seed, m);
  const auto step_chunks =
      (call.moments_bfloat16 ? kernels().adamw_prox_bfloat16_moments : kernels().adamw_prox)[call.dtype];
  const bool by_rows = reg_lambda > 0 && m > 4;
  at::parallel_for(0, by_rows ? rows(call.numel, call.in_features) : chunks(call.numel),
                   by_rows ? rows_per_task(kChunkWeights * kChunksPerTask, call.in_features) : kChunksPerTask,
                   [&](int64_t begin, int64_t end) { step_chunks(call, begin, end); });
}

}  // namespace proxsparse
