// The m - 2 largest of every m scores, and the weight under the mask of a score, on the CPU: checks and threads.
#include <ATen/Parallel.h>

#include "../ops.h"
#include "kernels.h"

namespace proxsparse {

constexpr int64_t kBlocksPerTask = 1 << 14;  // about 10 us of work: a few times the cost of waking a thread

void mask_nm(const at::Tensor& score, int64_t m, const at::Tensor& mask) {
  check_tensor("score", score, at::kCPU, score.sizes(), score.scalar_type());
  check_pattern("score", score, m);
  check_tensor("mask", mask, at::kCPU, score.sizes(), at::kBool);
  const int64_t in_features = in_features_of(score);
  const MaskCall call{score.const_data_ptr(), mask.mutable_data_ptr<bool>(), in_features, static_cast<int>(m)};
  const auto mask_blocks = kernels().mask[dtype_of(score, "score")];
  at::parallel_for(0, m == 4 ? score.numel() / 4 : rows(score.numel(), in_features),
                   m == 4 ? kBlocksPerTask : rows_per_task(4 * kBlocksPerTask, in_features),
                   [&](int64_t begin, int64_t end) { mask_blocks(call, begin, end); });
}

constexpr int64_t kChunksPerTask = 64;  // about 10 us of work

void masked_weight_nm_(const at::Tensor& out, const at::Tensor& weight, const at::Tensor& pretrained,
                       const OptionalTensor& scale, int64_t m) {
  const MaskedWeightCall call = checked_masked_weight(at::kCPU, out, weight, pretrained, scale, m);
  const auto masked_weight_chunks =
      call.pretrained_bfloat16 ? kernels().masked_weight_float32_bfloat16 : kernels().masked_weight[call.dtype];
  at::parallel_for(0, m == 4 ? chunks(call.numel) : rows(call.numel, call.in_features),
                   m == 4 ? kChunksPerTask : rows_per_task(kChunkWeights * kChunksPerTask, call.in_features),
                   [&](int64_t begin, int64_t end) { masked_weight_chunks(call, begin, end); });
}

}  // namespace proxsparse
