// One step of AdamW and the prox after it, chunk by chunk: every tensor is read and written once.
#pragma once

#include "../adamw.h"
#include "../random.h"
#include "kernels.h"
#include "solve.h"
#include "wide_prox.h"

namespace proxsparse {
inline namespace PROXSPARSE_ISA {

// The tensors from the first weight of a chunk on; null where the call has no such tensor.
template <typename Format, typename Moment>
struct ChunkPointers {
  typename Format::Storage* weight;
  const typename Format::Storage* grad;
  typename Moment::Storage *exp_avg, *exp_avg_sq;
  float* master;
};

// random_bits for each weight of N blocks, the first of which is number `first` of its tensor; zeros unless `needed`.
template <int N>
PROXSPARSE_INLINE auto random_of_blocks(uint64_t seed, int64_t first, bool needed) {
  using B = Vec<uint32_t, N>;
  if (!needed) return Block<B>{B(0), B(0), B(0), B(0)};
  uint32_t counted[N];
  for (int lane = 0; lane < N; ++lane) counted[lane] = static_cast<uint32_t>(first) + 4 * lane;
  const B low = B::load(counted);
  const auto high = static_cast<uint32_t>(first >> 32);  // 2^32 is a multiple of the chunk size: the same for all
  return each([=](B low) { return random_bits(low, high, seed); }, Block<B>{low, low + B(1), low + B(2), low + B(3)});
}

// `value` as it is stored: rounded to nearest, or stochastically (with `random`, 16 bits) if the format is bfloat16. A
// zero is +0, and a NaN stays a NaN.
template <typename Format, typename V, typename Bits>
PROXSPARSE_INLINE auto rounded(V value, bool stochastic, Bits random) {
  if constexpr (std::is_same_v<typename Format::Storage, typename Format::Arithmetic>) {
    return value;
  } else {
    if (std::is_same_v<Format, BFloat16> && stochastic) return round_stochastically(value, random);
    return select(value == value, Format::encode(magnitude(value), sign_bits(value)), Bits(Format::kNaN));
  }
}

template <typename Format, typename Moment, typename T = typename Format::Arithmetic>
PROXSPARSE_INLINE void adamw_prox_chunk(const AdamWProxCall& call, const ChunkPointers<Format, Moment>& chunk,
                                        const T* scale, int64_t first, int count) {
  constexpr int N = kLanes<T>;
  using V = Vec<T, N>;
  const AdamW<T> adamw(call);
  const ProxParams<T> params(call.reg_lambda);
  const bool stochastic = call.stochastic;
  BlockVectors<T> stepped;
  alignas(64) T numbers[kChunkWeights];  // the same weights in their order, for a prox with m > 4

  const auto load = [&](int b) {
    const int offset = 4 * b;
    const auto numbers = [](auto stored) { return decoded<Format>(stored); };
    const auto moments = [](auto stored) { return decoded<Moment>(stored); };
    const V lr(adamw.lr);
    Block<V> w = each(numbers, load_stored<Format, N>(chunk.weight + offset)), rate{lr, lr, lr, lr};
    if (chunk.master != nullptr) {
      if constexpr (std::is_same_v<T, float>) w = load_stored<Float32, N>(chunk.master + offset);
    }
    Block<V> g = each(numbers, load_stored<Format, N>(chunk.grad + offset));
    if (scale != nullptr) {
      const auto inverse = [](V c) { return V(1) / magnitude(c); };
      const Block<V> inverse_scale = each(inverse, load_stored<Native<T>, N>(scale + offset));
      g = each([](V g, V inverse) { return g * inverse; }, g, inverse_scale);
      rate = each([=](V inverse) { return lr * inverse; }, inverse_scale);
    }
    Block<V> m = each(moments, load_stored<Moment, N>(chunk.exp_avg + offset));
    Block<V> s = each(moments, load_stored<Moment, N>(chunk.exp_avg_sq + offset));
    w = {adamw.step(w.w1, g.w1, rate.w1, m.w1, s.w1), adamw.step(w.w2, g.w2, rate.w2, m.w2, s.w2),
         adamw.step(w.w3, g.w3, rate.w3, m.w3, s.w3), adamw.step(w.w4, g.w4, rate.w4, m.w4, s.w4)};
    if constexpr (std::is_same_v<Moment, BFloat16>) {
      const auto random = random_of_blocks<N>(call.seed, first + offset, stochastic);
      const auto low = [](auto bits) { return bits & decltype(bits)(0xffff); };
      const auto store = [=](V value, auto bits) { return rounded<Moment>(value, stochastic, bits); };
      store_stored<Moment>(each(store, m, each(low, random)), chunk.exp_avg + offset);
      const auto second = each([=](auto bits) { return low(mix(bits)); }, random);
      store_stored<Moment>(each(store, s, second), chunk.exp_avg_sq + offset);
    } else {
      store_stored<Moment>(m, chunk.exp_avg + offset);
      store_stored<Moment>(s, chunk.exp_avg_sq + offset);
    }
    stepped.store(b, w);
    return each([](V w, V unit) { return magnitude(w) * unit; }, w, units<V>(params, scale, b).unit);
  };
  const auto write = [&](int b, Block<V> stepped) {
    const int offset = 4 * b;
    const Block<V> w = each([](V w) { return w + V(0); }, stepped);  // -0 + 0 = 0
    if (chunk.master != nullptr) {
      if constexpr (std::is_same_v<T, float>) store_stored<Float32>(w, chunk.master + offset);
    }
    if constexpr (std::is_same_v<typename Format::Storage, T>) {
      store_stored<Format>(w, chunk.weight + offset);
    } else {
      const bool random = stochastic && chunk.master == nullptr;
      const auto store = [=](V value, auto bits) { return rounded<Format>(value, random, bits >> 16); };
      const auto bits = random_of_blocks<N>(call.seed, first + offset, random);
      store_stored<Format>(each(store, w, bits), chunk.weight + offset);
    }
  };
  if (call.reg_lambda == 0 || call.m > 4) {
    for (int b = 0; b < count / 4; b += N) {
      load(b);
      if (call.reg_lambda > 0) store_stored<Native<T>>(stepped.template load<V>(b), numbers + 4 * b);
    }
    if (call.reg_lambda > 0) {
      with_constant(call.m, [&](auto m) { prox_wide_chunk<T, m>(numbers, scale, call.reg_lambda, count); });
    }
    for (int b = 0; b < count / 4; b += N) {
      write(b, call.reg_lambda > 0 ? load_stored<Native<T>, N>(numbers + 4 * b) : stepped.template load<V>(b));
    }
    return;
  }
  const auto replace = [&](int b, int count, BlockVectors<T>& u) {
    const auto number = [&](int b, int i) {
      return scale == nullptr ? stepped.weight[i][b] : stepped.weight[i][b] * scale[4 * b + i];
    };
    replace_nonfinite(number, b, count, u);
  };
  const auto finish = [&](int b, Block<V> u, Block<V> x) {
    const auto result = [](V w, V u, V x, V inverse_unit) {
      return select(x == u, w, apply_magnitude(w, u, x, inverse_unit));
    };
    write(b, each(result, stepped.template load<V>(b), u, x, units<V>(params, scale, b).inverse));
  };
  solve_chunk<Native<T>>(load, replace, finish);
}

// A copy of the last, incomplete chunk of a tensor, padded with zeros.
template <typename S>
struct Padded {
  S numbers[kChunkWeights] = {};
  S* tensor;  // or null
  int64_t count;

  Padded(S* tensor, int64_t count) : tensor(tensor), count(count) {
    if (tensor != nullptr) std::memcpy(numbers, tensor, count * sizeof(S));
  }
  S* get() { return tensor == nullptr ? nullptr : numbers; }
  void copy_back() {
    if (tensor != nullptr) std::memcpy(tensor, numbers, count * sizeof(S));
  }
};

// Chunks `begin` to `end` of the tensors; rows if there is a prox with m > 4, whose blocks are in one row.
template <typename Format, typename Moment>
void adamw_prox_chunks(const AdamWProxCall& call, int64_t begin, int64_t end) {
  using T = typename Format::Arithmetic;
  using Storage = typename Format::Storage;
  using MomentStorage = typename Moment::Storage;
  const auto from = [](auto* tensor, int64_t first) { return tensor == nullptr ? nullptr : tensor + first; };
  int64_t whole = kChunkWeights;  // chunks of other sizes are padded
  if (call.reg_lambda > 0) with_constant(call.m, [&](auto m) { whole = kWideVectors<T, m>; });
  const int64_t chunk_weights = kChunkWeights / whole * whole;
  const int64_t unit = call.reg_lambda > 0 && call.m > 4 ? call.in_features : chunk_weights;
  for (int64_t first = unit * begin, last = 0; first < smaller(unit * end, call.numel); first = last) {
    last = smaller(first + chunk_weights, smaller((first / unit + 1) * unit, call.numel));
    const int64_t count = last - first;
    alignas(64) T scale_of_chunk[kChunkWeights];
    const T* scale = nullptr;
    if (call.scale != nullptr) {
      load_scale(call.scale, call.in_features, first, scale_of_chunk);
      scale = scale_of_chunk;
    }
    auto* weight = from(static_cast<Storage*>(call.weight), first);
    auto* grad = from(static_cast<Storage*>(const_cast<void*>(call.grad)), first);
    auto* exp_avg = from(static_cast<MomentStorage*>(call.exp_avg), first);
    auto* exp_avg_sq = from(static_cast<MomentStorage*>(call.exp_avg_sq), first);
    auto* master = from(static_cast<float*>(call.master), first);
    if (count % whole == 0) {
      const ChunkPointers<Format, Moment> pointers{weight, grad, exp_avg, exp_avg_sq, master};
      adamw_prox_chunk(call, pointers, scale, first, count);
      continue;
    }
    Padded<Storage> weights(weight, count), grads(grad, count);
    Padded<MomentStorage> exp_avgs(exp_avg, count), exp_avg_sqs(exp_avg_sq, count);
    Padded<float> masters(master, count);
    const ChunkPointers<Format, Moment> padded{weights.get(), grads.get(), exp_avgs.get(), exp_avg_sqs.get(),
                                               masters.get()};
    adamw_prox_chunk(call, padded, scale, first, (count + whole - 1) / whole * whole);
    weights.copy_back();
    exp_avgs.copy_back();
    exp_avg_sqs.copy_back();
    masters.copy_back();
  }
}

}  // namespace PROXSPARSE_ISA
}  // namespace proxsparse
