// The m - 2 largest of every m = 6, 8 or 10 scores, and the weight under the mask of a score, row by row.
#pragma once

#include "../block_ranks.h"
#include "wide_vectors.h"

namespace proxsparse {
inline namespace PROXSPARSE_ISA {

// N blocks of the mask.
template <typename Format, int m, int N>
PROXSPARSE_INLINE void mask_wide(const typename Format::Storage* score, bool* mask) {
  using V = Vec<typename Format::Arithmetic, N>;
  using Bits = typename V::Bits;
  using B = Vec<Bits, N>;
  const auto scores = [](auto stored) PROXSPARSE_INLINED { return comparable(decoded<Format>(stored)); };
  const Smallest<V> smallest = two_smallest(each(scores, load_wide<Format, m, N>(score)));
  B pairs[m / 2];  // of bytes, the first in the lowest byte
  repeat<m / 2>([&](auto i) PROXSPARSE_INLINED {
    pairs[i] = select(smallest.includes(2 * i), B(0), B(1)) | select(smallest.includes(2 * i + 1), B(0), B(0x100));
  });
  interleave<m / 2>(pairs);
  repeat<m / 2>([&](auto i) PROXSPARSE_INLINED {
    typedef uint16_t Pairs __attribute__((vector_size(2 * N)));
    const Pairs bytes = __builtin_convertvector(pairs[i].lanes.raw, Pairs);
    std::memcpy(mask + 2 * i * N, &bytes, sizeof(bytes));
  });
}

// The mask of the rows from `begin` to `end`; the remainder of a row is kept.
template <typename Format, int m>
void wide_mask_rows(const MaskCall& call, int64_t begin, int64_t end) {
  constexpr int N = kLanes<typename Format::Arithmetic>, kPiece = m * N;
  for (int64_t row = begin; row < end; ++row) {
    const auto* score = static_cast<const typename Format::Storage*>(call.score) + row * call.in_features;
    bool* mask = call.mask + row * call.in_features;
    int64_t first = 0;
    for (; first + kPiece <= call.in_features; first += kPiece) {
      mask_wide<Format, m, N>(score + first, mask + first);
    }
    const int64_t left = call.in_features - first;
    if (left == 0) continue;
    typename Format::Storage padded[kPiece] = {};
    bool padded_mask[kPiece];
    std::memcpy(padded, score + first, left * sizeof(*score));
    mask_wide<Format, m, N>(padded, padded_mask);
    std::memcpy(mask + first, padded_mask, left);
    std::memset(mask + call.in_features - left % m, true, left % m);
  }
}

// W0 under the mask of N blocks; `scale` is that of their weights, or null.
template <typename Format, typename Pretrained, int m, int N, typename T = typename Format::Arithmetic>
PROXSPARSE_INLINE void masked_weight_wide(const typename Format::Storage* weight,
                                          const typename Pretrained::Storage* pretrained, const T* scale,
                                          typename Pretrained::Storage* out) {
  using V = Vec<T, N>;
  const auto stored = load_wide<Pretrained, m, N>(pretrained);
  auto score =
      each([](auto stored) PROXSPARSE_INLINED { return decoded<Format>(stored); }, load_wide<Format, m, N>(weight));
  if (scale != nullptr) {
    score = each([](V w, V c) PROXSPARSE_INLINED { return w * c; }, score, load_wide<Native<T>, m, N>(scale));
  }
  const auto compared = [](V score, auto stored)
                            PROXSPARSE_INLINED { return comparable(times_sign(score, decoded<Pretrained>(stored))); };
  const Smallest<V> smallest = two_smallest(each(compared, score, stored));
  auto kept = stored;
  repeat<m>([&](auto i) PROXSPARSE_INLINED {
    kept.w[i] = select(smallest.includes(i), std::remove_cvref_t<decltype(kept.w[0])>(0), kept.w[i]);
  });
  store_wide<Pretrained>(kept, out);
}

// The weight under the mask of the rows from `begin` to `end`; the remainder of a row is W0.
template <typename Format, typename Pretrained, int m>
void wide_masked_weight_rows(const MaskedWeightCall& call, int64_t begin, int64_t end) {
  using T = typename Format::Arithmetic;
  constexpr int N = kLanes<T>, kPiece = m * N;
  const T* scale = static_cast<const T*>(call.scale);
  const auto scale_from = [=](int64_t first) { return scale == nullptr ? nullptr : scale + first; };
  for (int64_t row = begin; row < end; ++row) {
    const auto* weight = static_cast<const typename Format::Storage*>(call.weight) + row * call.in_features;
    const auto* pretrained = static_cast<const typename Pretrained::Storage*>(call.pretrained) + row * call.in_features;
    auto* out = static_cast<typename Pretrained::Storage*>(call.out) + row * call.in_features;
    int64_t first = 0;
    for (; first + kPiece <= call.in_features; first += kPiece) {
      masked_weight_wide<Format, Pretrained, m, N>(weight + first, pretrained + first, scale_from(first), out + first);
    }
    const int64_t left = call.in_features - first;
    if (left == 0) continue;
    typename Format::Storage padded[kPiece] = {};
    typename Pretrained::Storage padded_pretrained[kPiece] = {};
    T padded_scale[kPiece] = {};
    std::memcpy(padded, weight + first, left * sizeof(*weight));
    std::memcpy(padded_pretrained, pretrained + first, left * sizeof(*pretrained));
    if (scale != nullptr) std::memcpy(padded_scale, scale + first, left * sizeof(T));
    masked_weight_wide<Format, Pretrained, m, N>(padded, padded_pretrained, scale == nullptr ? nullptr : padded_scale,
                                                 padded_pretrained);
    std::memcpy(out + first, padded_pretrained, (left - left % m) * sizeof(*out));
    const int64_t whole = call.in_features - left % m;
    std::memcpy(out + whole, pretrained + whole, left % m * sizeof(*out));
  }
}

}  // namespace PROXSPARSE_ISA
}  // namespace proxsparse
