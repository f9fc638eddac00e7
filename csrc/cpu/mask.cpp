// The n largest of every four scores on the CPU: checks, and the threads.
#include <ATen/Parallel.h>

#include "../ops.h"
#include "dtypes.h"
#include "kernels.h"

namespace proxsparse {

constexpr int64_t kBlocksPerTask = 1 << 14;  // about 10 us of work, a few times what it costs to wake a thread

void mask_n4(const at::Tensor& score, int64_t n, const at::Tensor& mask) {
  TORCH_CHECK_VALUE(score.device().is_cpu() && score.is_contiguous(), "score must be a contiguous CPU tensor, not ",
                    score.sizes(), " on ", score.device(), "; call .cpu().contiguous() first");
  TORCH_CHECK_VALUE(score.dim() > 0 && score.size(-1) % 4 == 0, "score of shape ", score.sizes(),
                    ": in_features must be a multiple of 4; exclude this layer");
  TORCH_CHECK_VALUE(n == 1 || n == 2, "n=", n, ": this kernel serves 1:4 and 2:4; choose another backend");
  TORCH_CHECK_VALUE(mask.device().is_cpu() && mask.is_contiguous() && mask.scalar_type() == at::kBool &&
                        mask.sizes() == score.sizes(),
                    "mask of shape ", mask.sizes(), " and dtype ", mask.scalar_type(),
                    ": it must be a contiguous bool CPU tensor of shape ", score.sizes());
  const MaskArguments arguments{score.const_data_ptr(), mask.mutable_data_ptr<bool>(), n};
  const auto mask_blocks = kernels().mask[dtype_of(score, "score")];
  at::parallel_for(0, score.numel() / 4, kBlocksPerTask,
                   [&](int64_t begin, int64_t end) { mask_blocks(arguments, begin, end); });
}

}  // namespace proxsparse
