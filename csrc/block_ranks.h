// The order of four scores, on the CPU and on the GPU. T is one number or a vector of numbers.
#pragma once

#include "prox24_block.h"

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

// The number; for a NaN infinity.
template <typename T>
PROXSPARSE_INLINE T comparable(T value) {
  return select(value == value, value, T(std::numeric_limits<typename ScalarOf<T>::Type>::infinity()));
}

// rank_descending for scores; a NaN is treated as infinity.
template <typename T>
PROXSPARSE_INLINE Ranks<T> rank_scores(Block<T> score) {
  return rank_descending<T>({comparable(score.w1), comparable(score.w2), comparable(score.w3), comparable(score.w4)});
}

// score * sign(w0); the sign of a NaN is 0, as in torch.
template <typename T>
PROXSPARSE_INLINE T times_sign(T score, T w0) {
  const T one = T(1), zero = T(0);
  return score * (select(w0 > zero, one, zero) - select(w0 < zero, one, zero));
}

}  // namespace PROXSPARSE_ISA
}  // namespace proxsparse
