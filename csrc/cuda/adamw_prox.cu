// A step of AdamW, the gradient of the frozen-weight term, the metric and the prox, in one pass over memory.
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
  T decay;  // 1 - lr * weight_decay
  T lr;
  T bias1, root2;  // 1 - beta1^t and sqrt(1 - beta2^t)
  T frozen_lambda, frozen_eps;
  Regulariser<T> reg;
  bool prox, stochastic;
  uint64_t seed;
};

// One weight and what belongs to it.
template <typename T>
struct State {
  T w, mean, mean_square;
};

// d/dw of the frozen-weight term: 2 w (w - w0) (2 w - w0) / (w0 + eps sign(w0))^2, sign(0) = 1.
template <typename T>
__device__ T frozen_gradient(T w, T pretrained, T eps) {
  const T denominator = pretrained + (pretrained < 0 ? -eps : eps);
  return 2 * w * (w - pretrained) * (2 * w - pretrained) / (denominator * denominator);
}

// The base step on v = c * w with the gradient g / c.
template <typename Weight, typename Moment, typename T>
__device__ State<T> adamw(const AdamWArguments<Weight, Moment>& call, State<T> old, T grad, T c) {
  const T g = grad / c;
  const T mean = call.beta1 * old.mean + call.one_minus_beta1 * g;
  const T mean_square = call.beta2 * old.mean_square + call.one_minus_beta2 * g * g;
  const T step = mean / call.bias1 / (std::sqrt(mean_square) / call.root2 + call.eps);
  return {old.w * call.decay - call.lr / c * step, mean, mean_square};
}

// Which numbers a warp takes of every tensor, and the memory it may use on the way.
struct Place {
  int64_t first, size;
  void* buffer;
};

template <typename Format, int kPiece, typename T>
__device__ void read(const typename Format::Storage* tensor, Place place, T (&value)[kPiece]) {
  Piece<typename Format::Storage, kPiece> piece[1];
  Share<const typename Format::Storage, 1, kPiece>(tensor, place.first, place.size, place.buffer).load(piece);
  unpack(Format(), piece[0], value);
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
  Share<typename Format::Storage, 1, kPiece>(tensor, place.first, place.size, place.buffer).store(piece);
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
  const Place place{first, call.size, &tile};
  T c[kPiece];
  int64_t column = call.scale ? position % call.in_features : 0;
  PROXSPARSE_UNROLL
  for (int i = 0; i < kPiece; ++i) {
    c[i] = call.scale ? std::abs(call.scale[column]) : T(1);
    if (call.scale && ++column == call.in_features) column = 0;
  }

  T w[kPiece], grad[kPiece], mean[kPiece], mean_square[kPiece];
  if (call.master) {
    read<Native<T>>(call.master, place, w);
  } else {
    read<Weight>(call.weight, place, w);
  }
  read<Weight>(call.grad, place, grad);
  read<Moment>(call.exp_avg, place, mean);
  read<Moment>(call.exp_avg_sq, place, mean_square);
  if (call.pretrained) {
    T pretrained[kPiece];
    read<Weight>(call.pretrained, place, pretrained);
    PROXSPARSE_UNROLL
    for (int i = 0; i < kPiece; ++i) {
      grad[i] += call.frozen_lambda * frozen_gradient(w[i], pretrained[i], call.frozen_eps);
    }
  }
  PROXSPARSE_UNROLL
  for (int i = 0; i < kPiece; ++i) {
    const State<T> state = adamw(call, State<T>{w[i], mean[i], mean_square[i]}, grad[i], c[i]);
    w[i] = state.w, mean[i] = state.mean, mean_square[i] = state.mean_square;
  }
  const auto random = [&](int i) { return random_bits(static_cast<uint64_t>(position + i), call.seed); };
  write<Moment>(mean, call.exp_avg, place, call.stochastic, [&](int i) { return random(i).first & 0xffff; });
  write<Moment>(mean_square, call.exp_avg_sq, place, call.stochastic, [&](int i) { return random(i).second & 0xffff; });

  if (call.prox) {
    const auto magnitudes = [&](int b) {
      return Block<T>{std::abs(c[4 * b] * w[4 * b]), std::abs(c[4 * b + 1] * w[4 * b + 1]),
                      std::abs(c[4 * b + 2] * w[4 * b + 2]), std::abs(c[4 * b + 3] * w[4 * b + 3])};
    };
    const auto shrink_weights = [&](int b, Block<T> v) {
      const T magnitude[4] = {v.w1, v.w2, v.w3, v.w4};
      PROXSPARSE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int k = 4 * b + i;
        shrink(w[k], magnitude[i] < std::abs(c[k] * w[k]) ? magnitude[i] / c[k] : std::abs(w[k]));
      }
    };
    solve_blocks<Native<T>, kBlocks, kBlocks>(tile, call.reg, magnitudes, shrink_weights);
  }
  if (call.master) write<Native<T>>(w, call.master, place, false, random);
  write<Weight>(w, call.weight, place, call.stochastic && !call.master, [&](int i) { return random(i).first >> 16; });
}

template <typename Weight, typename Moment>
cudaError_t launch(const AdamWProxCall& call, cudaStream_t stream) {
  using T = typename Weight::Arithmetic;
  using WeightStorage = typename Weight::Storage;
  using MomentStorage = typename Moment::Storage;
  const auto number = [](double value) { return static_cast<T>(value); };
  const AdamWArguments<Weight, Moment> arguments{
      .weight = static_cast<WeightStorage*>(call.weight),
      .grad = static_cast<const WeightStorage*>(call.grad),
      .exp_avg = static_cast<MomentStorage*>(call.exp_avg),
      .exp_avg_sq = static_cast<MomentStorage*>(call.exp_avg_sq),
      .master = static_cast<T*>(call.master),
      .pretrained = static_cast<const WeightStorage*>(call.frozen_lambda > 0 ? call.pretrained : nullptr),
      .scale = static_cast<const T*>(call.scale),
      .size = call.size,
      .in_features = call.in_features,
      .beta1 = number(call.beta1),
      .one_minus_beta1 = number(1 - call.beta1),
      .beta2 = number(call.beta2),
      .one_minus_beta2 = number(1 - call.beta2),
      .eps = number(call.eps),
      .decay = number(1 - call.lr * call.weight_decay),
      .lr = number(call.lr),
      .bias1 = number(1 - std::pow(call.beta1, call.step)),
      .root2 = number(std::sqrt(1 - std::pow(call.beta2, call.step))),
      .frozen_lambda = number(call.frozen_lambda),
      .frozen_eps = number(call.frozen_eps),
      .reg = regulariser<T>(call.reg_lambda, call.n),
      .prox = call.reg_lambda > 0,
      .stochastic = call.stochastic,
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
