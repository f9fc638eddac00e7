// The n largest of every four scores.
#pragma once

#include "../formats.h"
#include "kernels.h"

namespace proxsparse {
inline namespace PROXSPARSE_ISA {

// For each position of a block: how many magnitudes come before it in descending order; ties keep their order. The
// ranks have type T because mixed widths would make the vector code convert them.
template <typename T>
struct Ranks {
  T r1, r2, r3, r4;
};

template <typename T>
PROXSPARSE_INLINE Ranks<T> rank_descending(Block<T> m) {
  const T one = T(1), zero = T(0);
  const T after12 = select(m.w1 < m.w2, one, zero), after13 = select(m.w1 < m.w3, one, zero);
  const T after14 = select(m.w1 < m.w4, one, zero), after23 = select(m.w2 < m.w3, one, zero);
  const T after24 = select(m.w2 < m.w4, one, zero), after34 = select(m.w3 < m.w4, one, zero);
  return {after12 + after13 + after14, one - after12 + after23 + after24, T(2) - after13 - after23 + after34,
          T(3) - after14 - after24 - after34};
}

// Blocks `begin` to `end`.
template <typename Format>
void mask_blocks(const MaskCall& call, int64_t begin, int64_t end) {
  using T = typename Format::Arithmetic;
  const auto* score = static_cast<const typename Format::Storage*>(call.score);
  bool* mask = call.mask;
  const T first_dropped = T(call.n) - T(0.5);
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
