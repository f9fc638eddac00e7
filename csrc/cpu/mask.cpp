// The n largest of every four scores, and the weight under the mask of a score, on the CPU: checks and threads.
#include <ATen/Parallel.h>

#include "../ops.h"
#include "kernels.h"

namespace proxsparse {

constexpr int64_t kBlocksPerTask = 1 << 14;  // about 10 us of work: a few times the cost of waking a thread

void mask_n4(const at::Tensor& score, int64_t n, const at::Tensor& mask) {
  check_tensor("score", score, at::kCPU, score.sizes(), score.scalar_type());
  check_in_features("score", score);
  check_n(n);
  check_tensor("mask", mask, at::kCPU, score.sizes(), at::kBool);
  const MaskCall call{score.const_data_ptr(), mask.mutable_data_ptr<bool>(), static_cast<int>(n)};
  const auto mask_blocks = kernels().mask[dtype_of(score, "score")];
  at::parallel_for(0, score.numel() / 4, kBlocksPerTask,
                   [&](int64_t begin, int64_t end) { mask_blocks(call, begin, end); });
}

constexpr int64_t kChunksPerTask = 64;  // about 10 us of work

void masked_weight_n4_(const at::Tensor& out, const at::Tensor& weight, const at::Tensor& pretrained,
                       const OptionalTensor& scale, int64_t n) {
  const MaskedWeightCall call = checked_masked_weight(at::kCPU, out, weight, pretrained, scale, n);
  const auto masked_weight_chunks =
      call.pretrained_bfloat16 ? kernels().masked_weight_float32_bfloat16 : kernels().masked_weight[call.dtype];
  at::parallel_for(0, chunks(call.numel), kChunksPerTask,
                   [&](int64_t begin, int64_t end) { masked_weight_chunks(call, begin, end); });
}

}  // namespace proxsparse
