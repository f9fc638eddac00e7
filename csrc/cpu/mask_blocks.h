// The n largest of every four scores.
#pragma once

#include "formats.h"
#include "kernels.h"

namespace proxsparse {
inline namespace PROXSPARSE_ISA {

// Blocks `begin` to `end`.
template <typename Format>
void mask_blocks(const MaskArguments& arguments, int64_t begin, int64_t end) {
  using T = typename Format::Arithmetic;
  const auto* score = static_cast<const typename Format::Storage*>(arguments.score);
  bool* mask = arguments.mask;
  const T first_dropped = T(arguments.n) - T(0.5);
  const auto comparable = [](T value) __attribute__((always_inline)) {
    return value == value ? value : std::numeric_limits<T>::infinity();
  };
#pragma omp simd
  for (int64_t b = begin; b < end; ++b) {
    const Ranks<T> rank =
        rank_descending<T>({comparable(Format::load(score[4 * b])), comparable(Format::load(score[4 * b + 1])),
                            comparable(Format::load(score[4 * b + 2])), comparable(Format::load(score[4 * b + 3]))});
    mask[4 * b] = rank.r1 < first_dropped;
    mask[4 * b + 1] = rank.r2 < first_dropped;
    mask[4 * b + 2] = rank.r3 < first_dropped;
    mask[4 * b + 3] = rank.r4 < first_dropped;
  }
}

}  // namespace PROXSPARSE_ISA
}  // namespace proxsparse
