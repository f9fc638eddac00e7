// x W^T + bias with a packed 2:4 W on the CPU: checks and threads.
#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include "../ops.h"
#include "kernels.h"

namespace proxsparse {

constexpr int64_t kProductsPerTask = 1 << 18;  // about 10 us of work: a few times the cost of waking a thread

void sparse_linear(const at::Tensor& x, const at::Tensor& values, const at::Tensor& indices, const OptionalTensor& bias,
                   const at::Tensor& y) {
  TORCH_CHECK_VALUE(x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16, "x has dtype ", x.scalar_type(),
                    ": this kernel supports float32 and bfloat16; choose another backend");
  check_sparse_linear(at::kCPU, x, values, indices, bias, y);
  if (y.numel() == 0) return;
  const int64_t rows = x.size(0), in_features = x.size(1), out_features = values.size(0);
  const bool reads_dtype = x.scalar_type() == at::kFloat || kernels().sparse_linear_reads_bfloat16;
  const at::Tensor readable = reads_dtype ? x : x.to(at::kFloat);
  const SparseLinearCall call{readable.const_data_ptr(),
                              values.const_data_ptr(),
                              indices.const_data_ptr<uint8_t>(),
                              data_or_null(bias),
                              y.mutable_data_ptr(),
                              rows,
                              in_features,
                              out_features};
  const auto sparse_linear_tiles = kernels().sparse_linear[dtype_of(x, "x")];
  const int64_t tiles_per_task = kProductsPerTask / (kTile * rows * in_features + 1) + 1;
  at::parallel_for(0, (out_features + kTile - 1) / kTile, tiles_per_task,
                   [&](int64_t begin, int64_t end) { sparse_linear_tiles(call, begin, end); });
}

}  // namespace proxsparse
