// One step of AdamW and the prox after it, chunk by chunk: every tensor is read and written once.
#pragma once

#include "kernels.h"
#include "random.h"
#include "solve.h"

namespace proxsparse {
inline namespace PROXSPARSE_ISA {

// The pieces of the tensors that belong to one chunk; null where the call has no such tensor.
template <typename Format, typename Moment>
struct ChunkPieces {
  typename Format::Storage* weight;
  const typename Format::Storage *grad, *pretrained;
  typename Moment::Storage *exp_avg, *exp_avg_sq;
  float* master;
};

// What stays the same in a call, in the arithmetic of the weights.
template <typename T>
struct AdamW {
  T lr, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, decay, correction1, correction2, frozen_lambda, frozen_eps;

  explicit AdamW(const AdamWProxArguments& a)
      : lr(a.lr),
        beta1(a.beta1),
        one_minus_beta1(1 - a.beta1),  // in double: of a float beta2 it would be off by 1e-5
        beta2(a.beta2),
        one_minus_beta2(1 - a.beta2),
        eps(a.eps),
        decay(a.decay),
        correction1(a.correction1),
        correction2(a.correction2),
        frozen_lambda(a.frozen_lambda),
        frozen_eps(a.frozen_eps) {}

  // 2 lambda_2 w (w - w0) (2w - w0) / (w0 + eps sign(w0))^2, sign(0) = 1
  template <typename V>
  PROXSPARSE_INLINE V frozen_gradient(V w, V w0) const {
    const V shifted = select(w0 >= V(0), w0 + V(frozen_eps), w0 - V(frozen_eps));
    return V(2 * frozen_lambda) * w * (w - w0) * (w + w - w0) / (shifted * shifted);
  }

  // The step of v = c w with gradient g, as one of w: with rate = lr / c. The moments, which are those of v, are
  // updated.
  template <typename V>
  PROXSPARSE_INLINE V step(V w, V g, V rate, V& exp_avg, V& exp_avg_sq) const {
    exp_avg = V(beta1) * exp_avg + V(one_minus_beta1) * g;
    exp_avg_sq = V(beta2) * exp_avg_sq + V(one_minus_beta2) * g * g;
    const V denominator = square_root(exp_avg_sq) * V(correction2) + V(eps);
    return w * V(decay) - rate * (exp_avg * V(correction1) / denominator);
  }
};

// `value` as it is stored: rounded to nearest, or stochastically with `bits` (16 random ones) where the format is
// bfloat16; a zero is +0, and a NaN stays one.
template <typename Format, typename V, typename Bits>
PROXSPARSE_INLINE auto rounded(V value, bool stochastic, Bits bits) {
  if constexpr (std::is_same_v<typename Format::Storage, typename Format::Arithmetic>) {
    return value;
  } else {
    const auto nearest = Format::encode(magnitude(value), sign_bits(value));
    const Bits exact = bits_as<uint32_t>(value), exponent(0x7f800000);
    const auto kept =
        select((exact & exponent) == exponent, select(value == value, nearest, Bits(Format::kNaN)), nearest);
    if (!std::is_same_v<Format, BFloat16> || !stochastic) return kept;
    const Bits moved = exact + bits;
    const Bits random = select((moved & Bits(0x7fff0000)) == Bits(0), Bits(0), moved);
    return select((exact & exponent) == exponent, kept, random);
  }
}

template <typename Format, typename Moment>
PROXSPARSE_INLINE void adamw_prox_chunk(const AdamWProxArguments& arguments, const ChunkPieces<Format, Moment>& pieces,
                                        const typename Format::Arithmetic* metric, int64_t first) {
  using T = typename Format::Arithmetic;
  constexpr int N = kLanes<T>;
  using V = Vec<T, N>;
  const AdamW<T> adamw(arguments);
  const Strength<T> strength = strength_of<T>(arguments.reg_lambda, arguments.n);
  const bool stochastic = arguments.stochastic;
  Lanes<T> stepped;

  const auto load = [&](int b) {
    const int at = 4 * b;
    const auto numbers = [](auto stored) { return decoded<Format>(stored); };
    const auto moments = [](auto stored) { return decoded<Moment>(stored); };
    const V lr(adamw.lr);
    Block<V> w = each(numbers, load_stored<Format, N>(pieces.weight + at)), rate{lr, lr, lr, lr};
    if (pieces.master != nullptr) {
      if constexpr (std::is_same_v<T, float>) w = load_stored<Float32, N>(pieces.master + at);
    }
    Block<V> g = each(numbers, load_stored<Format, N>(pieces.grad + at));
    if (pieces.pretrained != nullptr) {
      const Block<V> w0 = each(numbers, load_stored<Format, N>(pieces.pretrained + at));
      g = each([&](V g, V w, V w0) { return g + adamw.frozen_gradient(w, w0); }, g, w, w0);
    }
    if (metric != nullptr) {
      const auto inverse = [](V c) { return V(1) / magnitude(c); };
      const Block<V> inverse_metric = each(inverse, load_stored<Native<T>, N>(metric + at));
      g = each([](V g, V inverse) { return g * inverse; }, g, inverse_metric);
      rate = each([=](V inverse) { return lr * inverse; }, inverse_metric);
    }
    Block<V> m = each(moments, load_stored<Moment, N>(pieces.exp_avg + at));
    Block<V> s = each(moments, load_stored<Moment, N>(pieces.exp_avg_sq + at));
    w = {adamw.step(w.w1, g.w1, rate.w1, m.w1, s.w1), adamw.step(w.w2, g.w2, rate.w2, m.w2, s.w2),
         adamw.step(w.w3, g.w3, rate.w3, m.w3, s.w3), adamw.step(w.w4, g.w4, rate.w4, m.w4, s.w4)};
    if constexpr (std::is_same_v<Moment, BFloat16>) {
      const auto random = random_of_blocks<N>(arguments.seed, first + at, stochastic);
      const auto low = [](auto bits) { return bits & decltype(bits)(0xffff); };
      const auto store = [=](V value, auto bits) { return rounded<Moment>(value, stochastic, bits); };
      store_stored<Moment>(each(store, m, each(low, random)), pieces.exp_avg + at);
      const auto second = each([=](auto bits) { return low(mix(bits)); }, random);
      store_stored<Moment>(each(store, s, second), pieces.exp_avg_sq + at);
    } else {
      store_stored<Moment>(m, pieces.exp_avg + at);
      store_stored<Moment>(s, pieces.exp_avg_sq + at);
    }
    stepped.store(b, w);
    return each([](V w, V unit) { return magnitude(w) * unit; }, w, units<V>(strength, metric, b).unit);
  };
  const auto write = [&](int b, Block<V> stepped) {
    const int at = 4 * b;
    const Block<V> w = each([](V w) { return w + V(0); }, stepped);  // -0 + 0 = 0
    if (pieces.master != nullptr) {
      if constexpr (std::is_same_v<T, float>) store_stored<Float32>(w, pieces.master + at);
    }
    if constexpr (std::is_same_v<typename Format::Storage, T>) {
      store_stored<Format>(w, pieces.weight + at);
    } else {
      const bool random = stochastic && pieces.master == nullptr;
      const auto store = [=](V value, auto bits) { return rounded<Format>(value, random, bits >> 16); };
      store_stored<Format>(each(store, w, random_of_blocks<N>(arguments.seed, first + at, random)), pieces.weight + at);
    }
  };
  if (arguments.reg_lambda == 0) {
    for (int b = 0; b < kChunk; b += N) {
      load(b);
      write(b, stepped.template load<V>(b));
    }
    return;
  }
  const auto mended = [&](int b, int count, Lanes<T>& u) {
    const auto number = [&](int b, int i) {
      return metric == nullptr ? stepped.of[i][b] : stepped.of[i][b] * metric[4 * b + i];
    };
    mend(number, b, count, u);
  };
  const auto finish = [&](int b, Block<V> u, Block<V> x) {
    const auto result = [](V w, V u, V x, V inverse_unit) { return select(x == u, w, moved(w, u, x, inverse_unit)); };
    write(b, each(result, stepped.template load<V>(b), u, x, units<V>(strength, metric, b).inverse));
  };
  solve_chunk(strength, Native<T>::kSweepsNeeded, load, mended, finish);
}

// A tensor's piece of the last chunk, which may not be whole, in a place of its own; the rest are zeros.
template <typename S>
struct Padded {
  S numbers[kChunkWeights] = {};
  S* piece = nullptr;

  Padded(S* tensor, int64_t count) : piece(tensor) {
    if (tensor != nullptr) std::memcpy(numbers, tensor, count * sizeof(S));
  }
  S* get() { return piece == nullptr ? nullptr : numbers; }
  void put_back(int64_t count) {
    if (piece != nullptr) std::memcpy(piece, numbers, count * sizeof(S));
  }
};

// Chunks `begin` to `end` of the tensors.
template <typename Format, typename Moment>
void adamw_prox_chunks(const AdamWProxArguments& arguments, int64_t begin, int64_t end) {
  using T = typename Format::Arithmetic;
  using Storage = typename Format::Storage;
  using MomentStorage = typename Moment::Storage;
  const auto at = [](auto* tensor, int64_t first) { return tensor == nullptr ? nullptr : tensor + first; };
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    const int64_t first = kChunkWeights * chunk, count = smaller(kChunkWeights, arguments.numel - first);
    alignas(64) T metric_of_chunk[kChunkWeights];
    const T* metric = nullptr;
    if (arguments.scale != nullptr) {
      load_metric(static_cast<const T*>(arguments.scale), arguments.in_features, first, metric_of_chunk);
      metric = metric_of_chunk;
    }
    auto* weight = at(static_cast<Storage*>(arguments.weight), first);
    auto* grad = at(static_cast<Storage*>(const_cast<void*>(arguments.grad)), first);
    auto* pretrained = at(static_cast<Storage*>(const_cast<void*>(arguments.pretrained)), first);
    auto* exp_avg = at(static_cast<MomentStorage*>(arguments.exp_avg), first);
    auto* exp_avg_sq = at(static_cast<MomentStorage*>(arguments.exp_avg_sq), first);
    auto* master = at(arguments.master, first);
    if (count == kChunkWeights) {
      adamw_prox_chunk<Format, Moment>(arguments, {weight, grad, pretrained, exp_avg, exp_avg_sq, master}, metric,
                                       first);
      continue;
    }
    Padded<Storage> weights(weight, count), grads(grad, count), pretraineds(pretrained, count);
    Padded<MomentStorage> exp_avgs(exp_avg, count), exp_avg_sqs(exp_avg_sq, count);
    Padded<float> masters(master, count);
    adamw_prox_chunk<Format, Moment>(
        arguments, {weights.get(), grads.get(), pretraineds.get(), exp_avgs.get(), exp_avg_sqs.get(), masters.get()},
        metric, first);
    weights.put_back(count);
    exp_avgs.put_back(count);
    exp_avg_sqs.put_back(count);
    masters.put_back(count);
  }
}

}  // namespace PROXSPARSE_ISA
}  // namespace proxsparse
