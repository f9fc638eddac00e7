// n:4 weights to the packed form and back on the CPU: checks, and the threads.
#include <ATen/Parallel.h>

#include <atomic>
#include <type_traits>

#include "../ops.h"
#include "dtypes.h"
#include "kernels.h"
#include "pack_rows.h"

namespace proxsparse {
namespace {

// About 10 us of work, a few times what it costs to wake a thread.
constexpr int64_t kPackedPerTask = 1 << 14, kUnpackedPerTask = 1 << 17;

// f(begin, end) for the rows of the weight, on all threads.
template <typename F>
void parallel_rows(const at::Tensor& weight, int64_t weights_per_task, F f) {
  const int64_t in_features = weight.size(-1);
  at::parallel_for(0, weight.numel() / in_features, weights_per_task / in_features + 1, f);
}

// weight, values and indices have the shapes, dtypes and places in memory that belong together.
void check(const at::Tensor& weight, int64_t n, const at::Tensor& values, const at::Tensor& indices) {
  TORCH_CHECK_VALUE(n >= 1 && n <= 3, "n=", n,
                    ": only blocks of 4 are packed, 1:4, 2:4 or 3:4; leave the weight dense");
  TORCH_CHECK_VALUE(weight.dim() > 0 && weight.size(-1) % 4 == 0, "weight of shape ", weight.sizes(),
                    ": in_features must be a multiple of 4; exclude this layer");
  auto expected = weight.sizes().vec();
  expected.back() = weight.size(-1) / 4 * n;
  TORCH_CHECK_VALUE(values.sizes() == expected && values.scalar_type() == weight.scalar_type(), "values of shape ",
                    values.sizes(), " and dtype ", values.scalar_type(), ": a ", n, ":4 weight of shape ",
                    weight.sizes(), " has ", weight.scalar_type(), " values of shape ", at::IntArrayRef(expected));
  expected.back() = (expected.back() + 3) / 4;
  TORCH_CHECK_VALUE(indices.sizes() == expected && indices.scalar_type() == at::kByte, "indices of shape ",
                    indices.sizes(), " and dtype ", indices.scalar_type(), ": a ", n, ":4 weight of shape ",
                    weight.sizes(), " has uint8 indices of shape ", at::IntArrayRef(expected));
  for (const auto& tensor : {weight, values, indices}) {
    TORCH_CHECK_VALUE(tensor.device().is_cpu() && tensor.is_contiguous(), "a tensor of shape ", tensor.sizes(), " on ",
                      tensor.device(),
                      ": weight, values and indices must be contiguous CPU tensors; call "
                      ".cpu().contiguous() first");
  }
}

// f(bits, n): an unsigned number as wide as the dtype, and n as a compile-time constant.
template <typename F>
auto dispatch(Dtype dtype, int64_t n, F f) {
  const auto with_bits = [&](auto bits) {
    if (n == 1) return f(bits, std::integral_constant<int, 1>{});
    if (n == 2) return f(bits, std::integral_constant<int, 2>{});
    return f(bits, std::integral_constant<int, 3>{});
  };
  if (dtype == kFloat64) return with_bits(uint64_t{});
  if (dtype == kFloat32) return with_bits(uint32_t{});
  return with_bits(uint16_t{});
}

}  // namespace

bool pack_n4(const at::Tensor& weight, int64_t n, const at::Tensor& values, const at::Tensor& indices) {
  check(weight, n, values, indices);
  const Dtype dtype = dtype_of(weight, "weight");
  if (weight.numel() == 0) return true;
  const PackArguments arguments{weight.const_data_ptr(), values.mutable_data_ptr(), indices.mutable_data_ptr<uint8_t>(),
                                weight.size(-1)};
  const auto pack =
      dispatch(dtype, n, [](auto bits, auto n) { return &pack_rows<decltype(bits), decltype(n)::value>; });
  std::atomic<bool> feasible{true};
  parallel_rows(weight, kPackedPerTask, [&](int64_t begin, int64_t end) {
    if (!pack(arguments, begin, end)) feasible = false;
  });
  return feasible;
}

void unpack_n4(const at::Tensor& values, const at::Tensor& indices, int64_t n, const at::Tensor& weight) {
  check(weight, n, values, indices);
  const Dtype dtype = dtype_of(weight, "weight");
  if (weight.numel() == 0) return;
  const UnpackArguments arguments{values.const_data_ptr(), indices.const_data_ptr<uint8_t>(), weight.mutable_data_ptr(),
                                  weight.size(-1)};
  const auto any =
      dispatch(dtype, n, [](auto bits, auto n) { return &unpack_rows<decltype(bits), decltype(n)::value>; });
  const auto unpack = n == 2 ? kernels().unpack_24[dtype] : any;
  parallel_rows(weight, kUnpackedPerTask, [&](int64_t begin, int64_t end) { unpack(arguments, begin, end); });
}

}  // namespace proxsparse
