// The prox of chunks of blocks, in place.
#pragma once

#include "kernels.h"
#include "solve.h"

namespace proxsparse {
inline namespace PROXSPARSE_ISA {

// The prox of one whole chunk; metric is that of its weights, or null.
template <typename Format, bool kMetric, typename T = typename Format::Arithmetic>
PROXSPARSE_INLINE void prox_chunk(typename Format::Storage* weight, const T* metric, const Strength<T>& strength) {
  constexpr int N = kLanes<T>;
  using V = Vec<T, N>;
  const auto load = [=](int b) {
    return each([](auto stored, V unit) { return magnitude(decoded<Format>(stored)) * unit; },
                load_stored<Format, N>(weight + 4 * b), units<V>(strength, kMetric ? metric : nullptr, b).unit);
  };
  const auto mended = [=](int b, int count, Lanes<T>& u) {
    const auto number = [=](int b, int i) {
      const T w = Format::load(weight[4 * b + i]);
      return kMetric ? w * metric[4 * b + i] : w;
    };
    mend(number, b, count, u);
  };
  const auto finish = [=](int b, Block<V> u, Block<V> x) {
    const auto result = [](auto stored, V u, V x, V inverse_unit) {  // what stays keeps its bits
      if constexpr (std::is_same_v<typename Format::Storage, T>) {
        return select(x == u, stored, moved(stored, u, x, inverse_unit));
      } else {
        return select(x == u, stored, Format::encode(x * inverse_unit, sign_bits(stored)));
      }
    };
    store_stored<Format>(each(result, load_stored<Format, N>(weight + 4 * b), u, x,
                              units<V>(strength, kMetric ? metric : nullptr, b).inverse),
                         weight + 4 * b);
  };
  solve_chunk(strength, Format::kSweepsNeeded, load, mended, finish);
}

// Chunks `begin` to `end` of the weight.
template <typename Format>
void prox_chunks(const ProxArguments& arguments, int64_t begin, int64_t end) {
  using T = typename Format::Arithmetic;
  using Storage = typename Format::Storage;
  const Strength<T> strength = strength_of<T>(arguments.reg_lambda, arguments.n);
  const auto prox = [=](Storage* weight, int64_t first) {
    if (arguments.scale == nullptr) return prox_chunk<Format, false>(weight, static_cast<const T*>(nullptr), strength);
    alignas(64) T metric[kChunkWeights];
    load_metric(static_cast<const T*>(arguments.scale), arguments.in_features, first, metric);
    prox_chunk<Format, true>(weight, metric, strength);
  };
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    const int64_t first = kChunkWeights * chunk, count = smaller(kChunkWeights, arguments.numel - first);
    Storage* weight = static_cast<Storage*>(arguments.weight) + first;
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
