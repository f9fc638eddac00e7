// n:4 weights to the packed format and back on the CPU: checks and threads.
#include <ATen/Parallel.h>

#include <atomic>
#include <type_traits>

#include "../ops.h"
#include "kernels.h"
#include "pack_rows.h"

namespace proxsparse {
namespace {

// About 10 us of work: a few times the cost of waking a thread.
constexpr int64_t kPackedPerTask = 1 << 14, kUnpackedPerTask = 1 << 17;

// f(begin, end) for the rows of the weight, on all threads.
template <typename F>
void parallel_rows(const PackCall& call, int64_t weights_per_task, F f) {
  at::parallel_for(0, call.rows, weights_per_task / (call.in_features + 1) + 1, f);
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
  const PackCall call = checked_pack(at::kCPU, weight, n, values, indices);
  const auto pack = dispatch(dtype_of(weight, "weight"), n,
                             [](auto bits, auto n) { return &pack_rows<decltype(bits), decltype(n)::value>; });
  std::atomic<bool> feasible{true};
  parallel_rows(call, kPackedPerTask, [&](int64_t begin, int64_t end) {
    if (!pack(call, begin, end)) feasible = false;
  });
  return feasible;
}

void unpack_n4(const at::Tensor& values, const at::Tensor& indices, int64_t n, const at::Tensor& weight) {
  const PackCall call = checked_pack(at::kCPU, weight, n, values, indices);
  const Dtype dtype = dtype_of(weight, "weight");
  const auto unpack_any =
      dispatch(dtype, n, [](auto bits, auto n) { return &unpack_rows<decltype(bits), decltype(n)::value>; });
  const auto unpack = n == 2 ? kernels().unpack_24[dtype] : unpack_any;
  parallel_rows(call, kUnpackedPerTask, [&](int64_t begin, int64_t end) { unpack(call, begin, end); });
}

}  // namespace proxsparse
