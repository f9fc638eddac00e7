// x W^T + bias with a packed 2:4 W on the CPU: checks, and the threads.
#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include "../ops.h"
#include "dtypes.h"
#include "kernels.h"

namespace proxsparse {
namespace {

constexpr int64_t kProductsPerTask = 1 << 18;  // about 10 us of work, a few times what it costs to wake a thread

void check_one(const char* name, const at::Tensor& tensor, at::IntArrayRef shape, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(
      tensor.sizes() == shape && tensor.scalar_type() == dtype && tensor.device().is_cpu() && tensor.is_contiguous(),
      name, " of shape ", tensor.sizes(), " and dtype ", tensor.scalar_type(), " on ", tensor.device(),
      ": it must be a contiguous ", dtype, " CPU tensor of shape ", shape);
}

void check(const at::Tensor& x, const at::Tensor& values, const at::Tensor& indices,
           const std::optional<at::Tensor>& bias, const at::Tensor& y) {
  const auto dtype = x.scalar_type();
  TORCH_CHECK_VALUE(dtype == at::kFloat || dtype == at::kBFloat16, "x has dtype ", dtype,
                    ": this kernel serves float32 and bfloat16; choose another backend");
  TORCH_CHECK_VALUE(x.dim() == 2 && values.dim() == 2 && x.size(1) % 4 == 0, "x of shape ", x.sizes(),
                    " and values of shape ", values.sizes(),
                    ": both must have two dimensions, and in_features must be a multiple of 4");
  const int64_t rows = x.size(0), in_features = x.size(1), out_features = values.size(0);
  check_one("x", x, {rows, in_features}, dtype);
  check_one("values", values, {out_features, in_features / 2}, dtype);
  check_one("indices", indices, {out_features, (in_features + 7) / 8}, at::kByte);
  if (bias) check_one("bias", *bias, {out_features}, dtype);
  check_one("y", y, {rows, out_features}, dtype);
}

}  // namespace

void packed_linear(const at::Tensor& x, const at::Tensor& values, const at::Tensor& indices,
                   const std::optional<at::Tensor>& bias, const at::Tensor& y) {
  check(x, values, indices, bias, y);
  if (y.numel() == 0) return;
  const int64_t rows = x.size(0), in_features = x.size(1), out_features = values.size(0);
  const bool as_it_is = x.scalar_type() == at::kFloat || kernels().linear_reads_bfloat16;
  const at::Tensor readable = as_it_is ? x : x.to(at::kFloat);
  const LinearArguments arguments{readable.const_data_ptr(),
                                  values.const_data_ptr(),
                                  indices.const_data_ptr<uint8_t>(),
                                  bias ? bias->const_data_ptr() : nullptr,
                                  y.mutable_data_ptr(),
                                  rows,
                                  in_features,
                                  out_features};
  const auto linear_tiles = kernels().linear[dtype_of(x, "x")];
  const int64_t tiles_per_task = kProductsPerTask / (kTile * rows * in_features + 1) + 1;
  at::parallel_for(0, (out_features + kTile - 1) / kTile, tiles_per_task,
                   [&](int64_t begin, int64_t end) { linear_tiles(arguments, begin, end); });
}

}  // namespace proxsparse
