// The prox of 2:4 and 1:4 blocks on the CPU: checks, and the threads.
#include <ATen/Parallel.h>

#include <limits>

#include "../ops.h"
#include "dtypes.h"
#include "kernels.h"

namespace proxsparse {
namespace {

constexpr int64_t kChunksPerTask = 32;  // 10 to 60 us of work, a few times what it costs to wake a thread

void check(const at::Tensor& weight, double reg_lambda, int64_t n, const std::optional<at::Tensor>& scale) {
  TORCH_CHECK_VALUE(weight.device().is_cpu() && weight.is_contiguous(), "weight must be a contiguous CPU tensor, not ",
                    weight.sizes(), " on ", weight.device(), "; call .cpu().contiguous() first");
  TORCH_CHECK_VALUE(weight.dim() > 0 && weight.size(-1) % 4 == 0, "weight of shape ", weight.sizes(),
                    ": in_features must be a multiple of 4; exclude this layer");
  TORCH_CHECK_VALUE(n == 1 || n == 2, "n=", n, ": this kernel serves 1:4 and 2:4; choose another backend");
  TORCH_CHECK_VALUE(reg_lambda >= 0 && reg_lambda <= std::numeric_limits<double>::max(), "reg_lambda=", reg_lambda,
                    " must be a finite number >= 0");
  if (scale) {
    const auto expected = weight.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    TORCH_CHECK_VALUE(scale->device().is_cpu() && scale->is_contiguous() && scale->scalar_type() == expected &&
                          scale->dim() == 1 && scale->size(0) == weight.size(-1),
                      "scale of shape ", scale->sizes(), " and dtype ", scale->scalar_type(),
                      ": it must be a contiguous ", expected, " CPU tensor of shape [", weight.size(-1), "]");
  }
}

}  // namespace

void prox_n4_(const at::Tensor& weight, double reg_lambda, int64_t n, const std::optional<at::Tensor>& scale) {
  check(weight, reg_lambda, n, scale);
  if (reg_lambda == 0) return;
  const ProxArguments arguments{weight.mutable_data_ptr(),
                                scale ? scale->const_data_ptr() : nullptr,
                                weight.numel(),
                                weight.size(-1),
                                reg_lambda,
                                n};
  const auto prox_chunks = kernels().prox[dtype_of(weight, "weight")];
  at::parallel_for(0, (weight.numel() + kChunkWeights - 1) / kChunkWeights, kChunksPerTask,
                   [&](int64_t begin, int64_t end) { prox_chunks(arguments, begin, end); });
}

}  // namespace proxsparse
