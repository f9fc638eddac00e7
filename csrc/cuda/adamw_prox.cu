// A step of AdamW, the gradient of the frozen-weight term, the metric and the prox, in one pass over memory.
#include <algorithm>
#include <cmath>
#include <iterator>

#include "launch.h"
#include "random.h"
#include "solve.h"

namespace proxsparse::gpu {
namespace {

template <typename Weight, typename Moment>
struct AdamWArguments {
  using T = typename Weight::Arithmetic;
  typename Weight::Storage* weight;
  const typename Weight::Storage* grad;
  typename Moment::Storage *exp_avg, *exp_avg_sq;
  T* master;                                   // or null
  const typename Weight::Storage* pretrained;  // or null: no frozen-weight term
  const T* scale;                              // or null
  int64_t size, in_features;
  T beta1, one_minus_beta1, beta2, one_minus_beta2, eps;
  T decay;        // 1 - lr * weight_decay
  T rate;         // lr / (1 - beta1^t)
  T root_factor;  // 1 / sqrt(1 - beta2^t)
  T frozen_lambda, frozen_eps;
  Regulariser<T> reg;
  bool prox, stochastic, aligned;  // aligned: all tensors begin at a multiple of 16 bytes
  uint64_t seed;
};

// d/dw of the frozen-weight term: 2 w (w - w0) (2 w - w0) / (w0 + eps sign(w0))^2, sign(0) = 1.
template <typename T>
__device__ T frozen_gradient(T w, T pretrained, T eps) {
  const T denominator = pretrained + (pretrained < 0 ? -eps : eps);
  return 2 * w * (w - pretrained) * (2 * w - pretrained) / (denominator * denominator);
}

template <typename T, int kCount>
__device__ void divide(T (&value)[kCount], const T* c) {
  PROXSPARSE_UNROLL
  for (int i = 0; i < kCount; ++i) value[i] /= c[i];
}

// Which numbers a warp takes of every tensor, and the memory it may use on the way.
struct Place {
  int64_t first, size;
  void* buffer;
  bool direct;  // every tensor is aligned, and the warp's share of it whole: no detour through the buffer
};

// What a lane reads of every tensor, as it is in memory.
template <typename Weight, typename Moment, int kPiece>
struct Words {
  Piece<typename Weight::Storage, kPiece> weight, grad, pretrained;
  Piece<typename Weight::Arithmetic, kPiece> master;
  Piece<typename Moment::Storage, kPiece> exp_avg, exp_avg_sq;
};

template <typename Storage, int kPiece>
__device__ void read(const Storage* tensor, Place place, Piece<Storage, kPiece>& words) {
  Piece<Storage, kPiece> piece[1];
  Share<const Storage, 1, kPiece>(tensor, place.first, place.size, place.buffer, place.direct).load(piece);
  words = piece[0];
}

// Every load comes before the first use of any, so that a warp waits for memory once.
template <typename Weight, typename Moment, int kPiece>
__device__ void read(const AdamWArguments<Weight, Moment>& call, Place place, Words<Weight, Moment, kPiece>& words) {
  read(call.grad, place, words.grad);
  read<typename Moment::Storage>(call.exp_avg, place, words.exp_avg);
  read<typename Moment::Storage>(call.exp_avg_sq, place, words.exp_avg_sq);
  if (call.pretrained) read(call.pretrained, place, words.pretrained);
  if (call.master) {
    read<typename Weight::Arithmetic>(call.master, place, words.master);
  } else {
    read<typename Weight::Storage>(call.weight, place, words.weight);
  }
}

// Zeros are +0. `bits(i)` are those of number i for a bfloat16 that is rounded stochastically.
template <typename Format, int kPiece, typename T, typename Bits>
__device__ void write(const T (&value)[kPiece], typename Format::Storage* tensor, Place place, bool stochastic,
                      Bits bits) {
  Piece<typename Format::Storage, kPiece> piece[1];
  if constexpr (std::is_same_v<Format, BFloat16>) {
    if (stochastic) {
      PROXSPARSE_UNROLL
      for (int i = 0; i < kPiece; i += 2) {
        const uint32_t low = stochastic_bfloat16(static_cast<float>(value[i]), bits(i));
        const uint32_t high = stochastic_bfloat16(static_cast<float>(value[i + 1]), bits(i + 1));
        piece[0].words.word[i / 2] = high << 16 | low;
      }
    } else {
      pack(Format(), value, piece[0]);
    }
  } else {
    pack(Format(), value, piece[0]);
  }
  Share<typename Format::Storage, 1, kPiece>(tensor, place.first, place.size, place.buffer, place.direct).store(piece);
}

template <typename Weight, typename Moment>
__global__ void __launch_bounds__(kWarps* kLanes, sizeof(typename Weight::Arithmetic) == 8 ? 4 : 7)
    adamw_prox_kernel(AdamWArguments<Weight, Moment> call) {
  using T = typename Weight::Arithmetic;
  constexpr int kPiece = sizeof(typename Weight::Storage) == 2 ? 8 : 4, kBlocks = kPiece / 4;
  __shared__ Tile<T, kBlocks * kLanes> tiles[kWarps];
  Tile<T, kBlocks * kLanes>& tile = tiles[warp()];

  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kWarps + warp()) * kPiece * kLanes;
  const int64_t position = first + lane() * kPiece;
  const Place place{first, call.size, &tile, call.aligned && first + kPiece * kLanes <= call.size};
  Words<Weight, Moment, kPiece> words;
  if (place.direct) {
    read(call, {first, call.size, &tile, true}, words);
  } else {
    read(call, {first, call.size, &tile, false}, words);
  }
  T c[kPiece];
  PROXSPARSE_UNROLL
  for (int i = 0; i < kPiece; ++i) c[i] = 1;
  if (call.scale) {
    int64_t column = position % call.in_features;
    PROXSPARSE_UNROLL
    for (int i = 0; i < kPiece; ++i) {
      c[i] = std::abs(call.scale[column]);
      if (++column == call.in_features) column = 0;
    }
  }

  T w[kPiece], grad[kPiece], mean[kPiece], mean_square[kPiece];
  unpack(Weight(), words.grad, grad);
  unpack(Moment(), words.exp_avg, mean);
  unpack(Moment(), words.exp_avg_sq, mean_square);
  if (call.master) {
    unpack(Native<T>(), words.master, w);
  } else {
    unpack(Weight(), words.weight, w);
  }
  if (call.pretrained) {
    T pretrained[kPiece];
    unpack(Weight(), words.pretrained, pretrained);
    PROXSPARSE_UNROLL
    for (int i = 0; i < kPiece; ++i) {
      grad[i] += call.frozen_lambda * frozen_gradient(w[i], pretrained[i], call.frozen_eps);
    }
  }
  // the base step on v = c * w with the gradient g / c
  if (call.scale) divide(grad, c);
  T step[kPiece];
  PROXSPARSE_UNROLL
  for (int i = 0; i < kPiece; ++i) {
    mean[i] = call.beta1 * mean[i] + call.one_minus_beta1 * grad[i];
    mean_square[i] = call.beta2 * mean_square[i] + call.one_minus_beta2 * grad[i] * grad[i];
    step[i] = call.rate * mean[i] / (std::sqrt(mean_square[i]) * call.root_factor + call.eps);
  }
  if (call.scale) divide(step, c);
  PROXSPARSE_UNROLL
  for (int i = 0; i < kPiece; ++i) w[i] = w[i] * call.decay - step[i];
  uint32_t random[kPiece] = {};  // 32 bits a number, computed once; mix() gives 32 more
  if (call.stochastic) {
    PROXSPARSE_UNROLL
    for (int i = 0; i < kPiece; ++i) random[i] = random_bits(static_cast<uint64_t>(position + i), call.seed);
  }
  write<Moment>(mean, call.exp_avg, place, call.stochastic, [&](int i) { return random[i] & 0xffff; });
  write<Moment>(mean_square, call.exp_avg_sq, place, call.stochastic, [&](int i) { return mix(random[i]) & 0xffff; });

  if (call.prox) {
    const auto magnitudes = [&](int b) {
      return Block<T>{std::abs(c[4 * b] * w[4 * b]), std::abs(c[4 * b + 1] * w[4 * b + 1]),
                      std::abs(c[4 * b + 2] * w[4 * b + 2]), std::abs(c[4 * b + 3] * w[4 * b + 3])};
    };
    const auto shrink_weights = [&](int b, Block<T> v) {
      T magnitude[4] = {v.w1, v.w2, v.w3, v.w4};
      bool shrinks[4];
      PROXSPARSE_UNROLL
      for (int i = 0; i < 4; ++i) shrinks[i] = magnitude[i] < std::abs(c[4 * b + i] * w[4 * b + i]);
      if (call.scale) divide(magnitude, c + 4 * b);
      PROXSPARSE_UNROLL
      for (int i = 0; i < 4; ++i) shrink(w[4 * b + i], shrinks[i] ? magnitude[i] : std::abs(w[4 * b + i]));
    };
    solve_blocks<Native<T>, kBlocks, kBlocks>(tile, call.reg, magnitudes, shrink_weights);
  }
  const auto upper = [&](int i) { return random[i] >> 16; };
  if (call.master) write<Native<T>>(w, call.master, place, false, upper);
  write<Weight>(w, call.weight, place, call.stochastic && !call.master, upper);
}

template <typename Weight, typename Moment>
cudaError_t launch(const AdamWProxCall& call, cudaStream_t stream) {
  using T = typename Weight::Arithmetic;
  using WeightStorage = typename Weight::Storage;
  using MomentStorage = typename Moment::Storage;
  const auto number = [](double value) { return static_cast<T>(value); };
  const void* pretrained = call.frozen_lambda > 0 ? call.pretrained : nullptr;
  const void* tensors[] = {call.weight, call.grad, call.exp_avg, call.exp_avg_sq, call.master, pretrained};
  const auto is_aligned = [](const void* tensor) { return reinterpret_cast<uintptr_t>(tensor) % 16 == 0; };
  const AdamWArguments<Weight, Moment> arguments{
      .weight = static_cast<WeightStorage*>(call.weight),
      .grad = static_cast<const WeightStorage*>(call.grad),
      .exp_avg = static_cast<MomentStorage*>(call.exp_avg),
      .exp_avg_sq = static_cast<MomentStorage*>(call.exp_avg_sq),
      .master = static_cast<T*>(call.master),
      .pretrained = static_cast<const WeightStorage*>(pretrained),
      .scale = static_cast<const T*>(call.scale),
      .size = call.size,
      .in_features = call.in_features,
      .beta1 = number(call.beta1),
      .one_minus_beta1 = number(1 - call.beta1),
      .beta2 = number(call.beta2),
      .one_minus_beta2 = number(1 - call.beta2),
      .eps = number(call.eps),
      .decay = number(1 - call.lr * call.weight_decay),
      .rate = number(call.lr / (1 - std::pow(call.beta1, call.step))),
      .root_factor = number(1 / std::sqrt(1 - std::pow(call.beta2, call.step))),
      .frozen_lambda = number(call.frozen_lambda),
      .frozen_eps = number(call.frozen_eps),
      .reg = regulariser<T>(call.reg_lambda, call.n),
      .prox = call.reg_lambda > 0,
      .stochastic = call.stochastic,
      .aligned = std::all_of(std::begin(tensors), std::end(tensors), is_aligned),
      .seed = call.seed,
  };
  return launch_warps(adamw_prox_kernel<Weight, Moment>, call.size, kLanes * (sizeof(WeightStorage) == 2 ? 8 : 4),
                      arguments, stream);
}

template <typename Weight>
cudaError_t launch(const AdamWProxCall& call, cudaStream_t stream) {
  return call.moments_bfloat16 ? launch<Weight, BFloat16>(call, stream)
                               : launch<Weight, Native<typename Weight::Arithmetic>>(call, stream);
}

}  // namespace

cudaError_t launch_adamw_prox(const AdamWProxCall& call, cudaStream_t stream) {
  return with_format(call.type, [&](auto format) { return launch<decltype(format)>(call, stream); });
}

}  // namespace proxsparse::gpu
