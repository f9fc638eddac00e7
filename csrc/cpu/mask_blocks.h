// The two largest of every four scores, and the weight under the mask of a score.
#pragma once

#include "../block_ranks.h"
#include "../formats.h"
#include "solve.h"
#include "wide_mask.h"

namespace proxsparse {
inline namespace PROXSPARSE_ISA {

// Blocks `begin` to `end`.
template <typename Format>
void mask_blocks(const MaskCall& call, int64_t begin, int64_t end) {
  if (call.m > 4) return with_constant(call.m, [&](auto m) { wide_mask_rows<Format, m>(call, begin, end); });
  using T = typename Format::Arithmetic;
  const auto* score = static_cast<const typename Format::Storage*>(call.score);
  bool* mask = call.mask;
  const T first_dropped(1.5);
#pragma omp simd
  for (int64_t b = begin; b < end; ++b) {
    const Ranks<T> rank = rank_scores<T>({Format::load(score[4 * b]), Format::load(score[4 * b + 1]),
                                          Format::load(score[4 * b + 2]), Format::load(score[4 * b + 3])});
    mask[4 * b] = rank.r1 < first_dropped;
    mask[4 * b + 1] = rank.r2 < first_dropped;
    mask[4 * b + 2] = rank.r3 < first_dropped;
    mask[4 * b + 3] = rank.r4 < first_dropped;
  }
}

// W0 under the mask of one whole chunk; `scale` holds the scale of each of its weights, or is null.
template <typename Format, typename Pretrained, typename T = typename Format::Arithmetic>
PROXSPARSE_INLINE void masked_weight_chunk(const typename Format::Storage* weight,
                                           const typename Pretrained::Storage* pretrained, const T* scale,
                                           typename Pretrained::Storage* out) {
  constexpr int N = kLanes<T>;
  using V = Vec<T, N>;
  const V first_dropped(T(1.5));
  for (int b = 0; b < kChunk; b += N) {
    const auto stored = load_stored<Pretrained, N>(pretrained + 4 * b);
    Block<V> score = each([](auto stored) { return decoded<Format>(stored); }, load_stored<Format, N>(weight + 4 * b));
    if (scale != nullptr) {
      score = each([](V w, V c) { return w * c; }, score, load_stored<Native<T>, N>(scale + 4 * b));
    }
    const auto with_sign = [](V score, auto stored) { return times_sign(score, decoded<Pretrained>(stored)); };
    const Ranks<V> rank = rank_scores<V>(each(with_sign, score, stored));
    const auto kept = [=](auto stored, V rank) { return select(rank < first_dropped, stored, decltype(stored)(0)); };
    store_stored<Pretrained>(each(kept, stored, Block<V>{rank.r1, rank.r2, rank.r3, rank.r4}), out + 4 * b);
  }
}

// Chunks `begin` to `end`; W0 and the result are stored as Pretrained.
template <typename Format, typename Pretrained>
void masked_weight_chunks(const MaskedWeightCall& call, int64_t begin, int64_t end) {
  if (call.m > 4) {
    return with_constant(call.m, [&](auto m) { wide_masked_weight_rows<Format, Pretrained, m>(call, begin, end); });
  }
  using T = typename Format::Arithmetic;
  using Storage = typename Format::Storage;
  using PretrainedStorage = typename Pretrained::Storage;
  alignas(64) T scale_of_chunk[kChunkWeights];
  const T* scale = call.scale == nullptr ? nullptr : scale_of_chunk;
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    const int64_t first = kChunkWeights * chunk, count = smaller(kChunkWeights, call.numel - first);
    const auto* weight = static_cast<const Storage*>(call.weight) + first;
    const auto* pretrained = static_cast<const PretrainedStorage*>(call.pretrained) + first;
    auto* out = static_cast<PretrainedStorage*>(call.out) + first;
    if (scale != nullptr) load_scale(call.scale, call.in_features, first, scale_of_chunk);
    if (count == kChunkWeights) {
      masked_weight_chunk<Format, Pretrained>(weight, pretrained, scale, out);
    } else {
      Storage padded[kChunkWeights] = {};
      PretrainedStorage padded_pretrained[kChunkWeights] = {};
      std::memcpy(padded, weight, count * sizeof(Storage));
      std::memcpy(padded_pretrained, pretrained, count * sizeof(PretrainedStorage));
      masked_weight_chunk<Format, Pretrained>(padded, padded_pretrained, scale, padded_pretrained);
      std::memcpy(out, padded_pretrained, count * sizeof(PretrainedStorage));
    }
  }
}

}  // namespace PROXSPARSE_ISA
}  // namespace proxsparse
