// The prox of chunks of blocks, in place.
#pragma once

#include "kernels.h"
#include "solve.h"
#include "wide_prox.h"

namespace proxsparse {
inline namespace PROXSPARSE_ISA {

// The prox of one whole chunk.
template <typename Format, typename T = typename Format::Arithmetic>
PROXSPARSE_INLINE void prox_chunk(typename Format::Storage* weight, const ProxParams<T>& params) {
  constexpr int N = kLanes<T>;
  using V = Vec<T, N>;
  const V unit(params.lambda), inverse_unit(params.inverse_lambda);
  const auto load = [=](int b) {
    return each([=](auto stored) { return magnitude(decoded<Format>(stored)) * unit; },
                load_stored<Format, N>(weight + 4 * b));
  };
  const auto replace = [=](int b, int count, BlockVectors<T>& u) {
    replace_nonfinite([=](int b, int i) { return Format::load(weight[4 * b + i]); }, b, count, u);
  };
  const auto finish = [=](int b, Block<V> u, Block<V> x) {
    const auto result = [=](auto stored, V u, V x) {  // a weight that does not change keeps its bits
      if constexpr (std::is_same_v<typename Format::Storage, T>) {
        return select(x == u, stored, apply_magnitude(stored, u, x, inverse_unit));
      } else {
        return select(x == u, stored, Format::encode(x * inverse_unit, sign_bits(stored)));
      }
    };
    store_stored<Format>(each(result, load_stored<Format, N>(weight + 4 * b), u, x), weight + 4 * b);
  };
  solve_chunk<Format>(load, replace, finish);
}

// Chunks `begin` to `end` of the weight, or rows if m > 4.
template <typename Format>
void prox_chunks(const ProxCall& call, int64_t begin, int64_t end) {
  if (call.m > 4) return with_constant(call.m, [&](auto m) { wide_prox_rows<Format, m>(call, begin, end); });
  using Storage = typename Format::Storage;
  const ProxParams<typename Format::Arithmetic> params(call.reg_lambda);
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    const int64_t first = kChunkWeights * chunk, count = smaller(kChunkWeights, call.numel - first);
    Storage* weight = static_cast<Storage*>(call.weight) + first;
    if (count == kChunkWeights) {
      prox_chunk<Format>(weight, params);
    } else {
      Storage padded[kChunkWeights] = {};
      std::memcpy(padded, weight, count * sizeof(Storage));
      prox_chunk<Format>(padded, params);
      std::memcpy(weight, padded, count * sizeof(Storage));
    }
  }
}

}  // namespace PROXSPARSE_ISA
}  // namespace proxsparse
