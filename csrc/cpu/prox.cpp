// The prox of (m-2):m blocks on the CPU: checks and threads.
#include <ATen/Parallel.h>

#include "../ops.h"
#include "kernels.h"

namespace proxsparse {

constexpr int64_t kChunksPerTask = 32;  // 10 to 60 us of work: a few times the cost of waking a thread

void prox_nm_(const at::Tensor& weight, double reg_lambda, int64_t m) {
  const ProxCall call = checked_prox(at::kCPU, weight, reg_lambda, m);
  if (reg_lambda == 0) return;
  const auto prox_chunks = kernels().prox[call.dtype];
  at::parallel_for(0, m == 4 ? chunks(call.numel) : rows(call.numel, call.in_features),
                   m == 4 ? kChunksPerTask : rows_per_task(kChunkWeights * kChunksPerTask, call.in_features),
                   [&](int64_t begin, int64_t end) { prox_chunks(call, begin, end); });
}

}  // namespace proxsparse
