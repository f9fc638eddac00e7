// The prox of chunks of blocks, in place.
#pragma once

#include "kernels.h"
#include "solve.h"
#include "wide_prox.h"

namespace proxsparse {
inline namespace PROXSPARSE_ISA {

// The prox of one whole chunk; `scale` holds the scale of each of its weights, or is null.
template <typename Format, bool kScaled, typename T = typename Format::Arithmetic>
PROXSPARSE_INLINE void prox_chunk(typename Format::Storage* weight, const T* scale, const ProxParams<T>& params) {
  constexpr int N = kLanes<T>;
  using V = Vec<T, N>;
  const auto load = [=](int b) {
    return each([](auto stored, V unit) { return magnitude(decoded<Format>(stored)) * unit; },
                load_stored<Format, N>(weight + 4 * b), units<V>(params, kScaled ? scale : nullptr, b).unit);
  };
  const auto replace = [=](int b, int count, BlockVectors<T>& u) {
    const auto number = [=](int b, int i) {
      const T w = Format::load(weight[4 * b + i]);
      return kScaled ? w * scale[4 * b + i] : w;
    };
    replace_nonfinite(number, b, count, u);
  };
  const auto finish = [=](int b, Block<V> u, Block<V> x) {
    const auto result = [](auto stored, V u, V x, V inverse_unit) {  // a weight that does not change keeps its bits
      if constexpr (std::is_same_v<typename Format::Storage, T>) {
        return select(x == u, stored, apply_magnitude(stored, u, x, inverse_unit));
      } else {
        return select(x == u, stored, Format::encode(x * inverse_unit, sign_bits(stored)));
      }
    };
    store_stored<Format>(each(result, load_stored<Format, N>(weight + 4 * b), u, x,
                              units<V>(params, kScaled ? scale : nullptr, b).inverse),
                         weight + 4 * b);
  };
  solve_chunk<Format>(load, replace, finish);
}

// Chunks `begin` to `end` of the weight, or rows if m > 4.
template <typename Format>
void prox_chunks(const ProxCall& call, int64_t begin, int64_t end) {
  if (call.m > 4) return with_constant(call.m, [&](auto m) { wide_prox_rows<Format, m>(call, begin, end); });
  using T = typename Format::Arithmetic;
  using Storage = typename Format::Storage;
  const ProxParams<T> params(call.reg_lambda);
  const auto prox = [=](Storage* weight, int64_t first) {
    if (call.scale == nullptr) return prox_chunk<Format, false>(weight, static_cast<const T*>(nullptr), params);
    alignas(64) T scale[kChunkWeights];
    load_scale(call.scale, call.in_features, first, scale);
    prox_chunk<Format, true>(weight, scale, params);
  };
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    const int64_t first = kChunkWeights * chunk, count = smaller(kChunkWeights, call.numel - first);
    Storage* weight = static_cast<Storage*>(call.weight) + first;
    if (count == kChunkWeights) {
      prox(weight, first);
    } else {
      Storage padded[kChunkWeights] = {};
      std::memcpy(padded, weight, count * sizeof(Storage));
      prox(padded, first);
      std::memcpy(weight, padded, count * sizeof(Storage));
    }
  }
}

}  // namespace PROXSPARSE_ISA
}  // namespace proxsparse
