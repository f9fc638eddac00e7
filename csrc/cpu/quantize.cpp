// The values of packed weights to codes of 8 or 4 bits and back on the CPU; proxsparse/reference/quantize.py has the
// equations.
#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <type_traits>

#include "../codes.h"
#include "../ops.h"

namespace proxsparse {
namespace {

constexpr int64_t kGroup = kScaleColumns / 2;  // values with a common scale of 4 bits
constexpr int64_t kPerTask = 1 << 12;          // values, about 100 us of work
constexpr double kExtremes[] = {-8, -7, -6, -5, -4, -3, -2, -1, -9, -8.5, -7.5, -6.5};

template <typename T>
using ArithmeticOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

// The integer nearest to value / scale, ties to even, from `smallest` to `largest`; 0 for a scale of 0.
template <typename A>
A nearest_code(A value, A scale, A smallest, A largest) {
  constexpr A kInteger = sizeof(A) == 8 ? 6755399441055744.0 : 12582912.0f;  // numbers of this size have no fraction
  const A quotient = scale == 0 ? 0 : value / scale;
  return std::min(std::max(quotient, smallest), largest) + kInteger - kInteger;
}

// The smallest T that is at least `positive`: the next number has the next bit pattern.
template <typename T, typename A>
T rounded_up(A positive) {
  using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;
  T nearest = static_cast<T>(positive);
  if (static_cast<A>(nearest) < positive)
    nearest = std::bit_cast<T>(static_cast<Bits>(std::bit_cast<Bits>(nearest) + 1));
  return nearest;
}

template <typename T>
void quantize_row_8(const T* values, int64_t k, int8_t* codes, T* scale) {
  using A = ArithmeticOf<T>;
  A largest = 0;
  for (int64_t i = 0; i < k; ++i) largest = std::max(largest, std::abs(static_cast<A>(values[i])));
  *scale = rounded_up<T>(largest / 127);
  for (int64_t i = 0; i < k; ++i) {
    codes[i] = static_cast<int8_t>(nearest_code<A>(static_cast<A>(values[i]), static_cast<A>(*scale), -127, 127));
  }
}

// A group of up to kGroup values, of which `values` are the first `count`.
template <typename T>
void quantize_group_4(const T* values, int64_t count, uint8_t* packed, T* scale) {
  using A = ArithmeticOf<T>;
  A group[kGroup] = {}, extreme = 0, codes[kGroup], best_codes[kGroup] = {};
  for (int64_t i = 0; i < count; ++i) {
    group[i] = static_cast<A>(values[i]);
    if (std::abs(group[i]) > std::abs(extreme)) extreme = group[i];
  }
  double best = INFINITY;
  *scale = 0;  // of values that are not finite, which the caller refuses
  for (const double code : kExtremes) {
    const T rounded = static_cast<T>(extreme / static_cast<A>(code));
    const A candidate = static_cast<A>(rounded);
    double error = 0;
    for (int64_t i = 0; i < kGroup; ++i) {
      codes[i] = nearest_code<A>(group[i], candidate, -8, 7);
      const double difference = static_cast<double>(codes[i]) * candidate - group[i];
      error += difference * difference;
    }
    if (error < best) {
      best = error;
      *scale = rounded;
      std::copy(codes, codes + kGroup, best_codes);
    }
  }
  for (int64_t i = 0; i < count; i += 2) {
    const int low = static_cast<int>(best_codes[i]), high = static_cast<int>(best_codes[i + 1]);
    packed[i / 2] = static_cast<uint8_t>((low & 15) | (high & 15) << 4);
  }
}

template <typename T>
T dequantized(int code, T scale) {
  using A = ArithmeticOf<T>;
  return static_cast<T>(static_cast<A>(code) * static_cast<A>(scale));
}

// f(T{}) for the dtype of the values.
template <typename F>
void dispatch(const at::Tensor& values, F f) {
  switch (dtype_of(values, "values")) {
    case kFloat32:
      return f(float{});
    case kFloat64:
      return f(double{});
    case kBFloat16:
      return f(c10::BFloat16{});
    default:
      return f(c10::Half{});
  }
}

// Checks the tensors of both directions; returns whether the codes have 8 bits.
bool check_quantized(const at::Tensor& values, const at::Tensor& codes, const at::Tensor& scales) {
  const bool is_8_bits = codes.scalar_type() == at::kChar;
  check_tensor("values", values, at::kCPU, values.sizes(), scales.scalar_type());
  auto sizes = values.sizes().vec();
  TORCH_CHECK_VALUE(!sizes.empty() && (is_8_bits || sizes.back() % 2 == 0), "values of shape ", values.sizes(),
                    ": codes of 4 bits need an even number of values in a row");
  const int64_t k = sizes.back();
  sizes.back() = is_8_bits ? k : k / 2;
  check_tensor("codes", codes, at::kCPU, sizes, is_8_bits ? at::kChar : at::kByte);
  sizes.back() = is_8_bits ? 1 : (k + kGroup - 1) / kGroup;
  check_tensor("scales", scales, at::kCPU, sizes, scales.scalar_type());
  return is_8_bits;
}

// f(row) for all rows, on all threads.
template <typename F>
void parallel_rows(const at::Tensor& values, const at::Tensor& scales, F f) {
  const int64_t rows = scales.numel() / std::max<int64_t>(scales.size(-1), 1);
  at::parallel_for(0, rows, kPerTask / (values.size(-1) + 1) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) f(row);
  });
}

}  // namespace

void quantize_nm(const at::Tensor& values, const at::Tensor& codes, const at::Tensor& scales) {
  const bool is_8_bits = check_quantized(values, codes, scales);
  const int64_t k = values.size(-1), groups = scales.size(-1);
  dispatch(values, [&](auto type) {
    using T = decltype(type);
    const T* from = static_cast<const T*>(values.const_data_ptr());
    T* scale = static_cast<T*>(scales.mutable_data_ptr());
    auto* to = static_cast<uint8_t*>(codes.mutable_data_ptr());
    parallel_rows(values, scales, [&](int64_t row) {
      if (is_8_bits) return quantize_row_8(from + row * k, k, reinterpret_cast<int8_t*>(to) + row * k, scale + row);
      for (int64_t i = 0; i < k; i += kGroup) {
        quantize_group_4(from + row * k + i, std::min(kGroup, k - i), to + (row * k + i) / 2,
                         scale + row * groups + i / kGroup);
      }
    });
  });
}

void dequantize_nm(const at::Tensor& codes, const at::Tensor& scales, const at::Tensor& values) {
  const bool is_8_bits = check_quantized(values, codes, scales);
  const int64_t k = values.size(-1), groups = scales.size(-1);
  const auto* from = static_cast<const uint8_t*>(codes.const_data_ptr());
  dispatch(values, [&](auto type) {
    using T = decltype(type);
    T* to = static_cast<T*>(values.mutable_data_ptr());
    const auto* scale = static_cast<const T*>(scales.const_data_ptr());
    parallel_rows(values, scales, [&](int64_t row) {
      for (int64_t i = row * k; i < (row + 1) * k; ++i) {
        const int64_t column = i - row * k;
        to[i] = is_8_bits
                    ? dequantized<T>(static_cast<int8_t>(from[i]), scale[row])
                    : dequantized<T>(signed_code(from[i / 2] >> i % 2 * 4), scale[row * groups + column / kGroup]);
      }
    });
  });
}

}  // namespace proxsparse
