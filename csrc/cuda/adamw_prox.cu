// A step of AdamW, the scale and the prox, in one pass over memory.
#include <algorithm>
#include <iterator>

#include "../adamw.h"
#include "../random.h"
#include "launch.h"
#include "solve.h"

namespace proxsparse::gpu {
namespace {

template <typename Weight, typename Moment>
struct AdamWArguments {
  using T = typename Weight::Arithmetic;
  typename Weight::Storage* weight;
  const typename Weight::Storage* grad;
  typename Moment::Storage *exp_avg, *exp_avg_sq;
  T* master;       // or null
  const T* scale;  // or null
  int64_t size, in_features;
  AdamW<T> adamw;
  ProxParams<T> params;
  bool prox, stochastic, aligned;  // aligned: all tensors begin at a multiple of 16 bytes
  uint64_t seed;
};

// The numbers that a lane reads of every tensor, as they are stored.
template <typename Weight, typename Moment, int kPiece>
struct LaneNumbers {
  Piece<typename Weight::Storage, kPiece> weight, grad;
  Piece<typename Weight::Arithmetic, kPiece> master;
  Piece<typename Moment::Storage, kPiece> exp_avg, exp_avg_sq;
};

// Every load comes before the first use of any, so that a warp waits for memory only once.
template <typename Weight, typename Moment, int kPiece>
__device__ void read(const AdamWArguments<Weight, Moment>& call, WarpRange range,
                     LaneNumbers<Weight, Moment, kPiece>& numbers) {
  load_piece(call.grad, range, numbers.grad);
  load_piece<typename Moment::Storage>(call.exp_avg, range, numbers.exp_avg);
  load_piece<typename Moment::Storage>(call.exp_avg_sq, range, numbers.exp_avg_sq);
  if (call.master) {
    load_piece<typename Weight::Arithmetic>(call.master, range, numbers.master);
  } else {
    load_piece<typename Weight::Storage>(call.weight, range, numbers.weight);
  }
}

// Zeros are +0. random(i): 16 random bits for number i, for stochastic rounding to bfloat16.
template <typename Format, int kPiece, typename T, typename Random>
__device__ void write(const T (&value)[kPiece], typename Format::Storage* tensor, WarpRange range, bool stochastic,
                      Random random) {
  Piece<typename Format::Storage, kPiece> piece;
  if (std::is_same_v<Format, BFloat16> && stochastic) {
    if constexpr (std::is_same_v<Format, BFloat16>) {
      PROXSPARSE_UNROLL
      for (int i = 0; i < kPiece; i += 2) {
        const uint32_t low = round_stochastically(static_cast<float>(value[i]), random(i));
        const uint32_t high = round_stochastically(static_cast<float>(value[i + 1]), random(i + 1));
        piece.words.word[i / 2] = __byte_perm(low, high, 0x7632);  // the upper halves
      }
    }
  } else {
    pack(Format(), value, piece);
  }
  store_piece(piece, range, tensor);
}

template <typename Weight, typename Moment>
__global__ void __launch_bounds__(kWarps* kLanes, sizeof(typename Weight::Arithmetic) == 8 ? 4 : 7)
    adamw_prox_kernel(AdamWArguments<Weight, Moment> call) {
  using T = typename Weight::Arithmetic;
  constexpr int kPiece = sizeof(typename Weight::Storage) == 2 ? 8 : 4, kBlocks = kPiece / 4;
  __shared__ WarpBlocks<T, kBlocks * kLanes> shared[kWarps];
  WarpBlocks<T, kBlocks * kLanes>& blocks = shared[warp()];

  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kWarps + warp()) * kPiece * kLanes;
  const int64_t position = first + lane() * kPiece;
  const WarpRange range{first, call.size, &blocks, call.aligned && first + kPiece * kLanes <= call.size};
  LaneNumbers<Weight, Moment, kPiece> numbers;
  if (range.direct) {
    read(call, {first, call.size, &blocks, true}, numbers);
  } else {
    read(call, {first, call.size, &blocks, false}, numbers);
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

  T w[kPiece], grad[kPiece], exp_avg[kPiece], exp_avg_sq[kPiece];
  unpack(Weight(), numbers.grad, grad);
  unpack(Moment(), numbers.exp_avg, exp_avg);
  unpack(Moment(), numbers.exp_avg_sq, exp_avg_sq);
  if (call.master) {
    unpack(Native<T>(), numbers.master, w);
  } else {
    unpack(Weight(), numbers.weight, w);
  }
  PROXSPARSE_UNROLL
  for (int i = 0; i < kPiece; ++i) {  // the step of v = c * w, whose gradient is g / c
    const T inverse = call.scale ? 1 / c[i] : 1;
    w[i] = call.adamw.step(w[i], grad[i] * inverse, call.adamw.lr * inverse, exp_avg[i], exp_avg_sq[i]);
  }
  uint32_t random[kPiece] = {};
  if (call.stochastic) {
    PROXSPARSE_UNROLL
    for (int i = 0; i < kPiece; ++i) {
      const auto index = static_cast<uint64_t>(position + i);
      random[i] = random_bits(static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), call.seed);
    }
  }
  write<Moment>(exp_avg, call.exp_avg, range, call.stochastic, [&](int i) { return random[i] & 0xffff; });
  write<Moment>(exp_avg_sq, call.exp_avg_sq, range, call.stochastic, [&](int i) { return mix(random[i]) & 0xffff; });

  if (call.prox) {
    const auto magnitudes = [&](int b) {
      return Block<T>{std::abs(c[4 * b] * w[4 * b]), std::abs(c[4 * b + 1] * w[4 * b + 1]),
                      std::abs(c[4 * b + 2] * w[4 * b + 2]), std::abs(c[4 * b + 3] * w[4 * b + 3])};
    };
    const auto shrink_weights = [&](int b, Block<T> v) {
      const T magnitude[4] = {v.w1, v.w2, v.w3, v.w4};
      PROXSPARSE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const T c_i = c[4 * b + i], old = std::abs(w[4 * b + i]);
        shrink(w[4 * b + i], magnitude[i] < c_i * old ? (call.scale ? magnitude[i] / c_i : magnitude[i]) : old);
      }
    };
    solve_blocks<Native<T>, kBlocks, kBlocks>(blocks, call.params, magnitudes, shrink_weights);
  }
  const auto upper = [&](int i) { return random[i] >> 16; };
  if (call.master) write<Native<T>>(w, call.master, range, false, upper);
  write<Weight>(w, call.weight, range, call.stochastic && !call.master, upper);
}

template <typename Weight, typename Moment>
cudaError_t launch(const AdamWProxCall& call, cudaStream_t stream) {
  using T = typename Weight::Arithmetic;
  using WeightStorage = typename Weight::Storage;
  using MomentStorage = typename Moment::Storage;
  const void* tensors[] = {call.weight, call.grad, call.exp_avg, call.exp_avg_sq, call.master};
  const auto is_aligned = [](const void* tensor) { return reinterpret_cast<uintptr_t>(tensor) % 16 == 0; };
  const AdamWArguments<Weight, Moment> arguments{
      .weight = static_cast<WeightStorage*>(call.weight),
      .grad = static_cast<const WeightStorage*>(call.grad),
      .exp_avg = static_cast<MomentStorage*>(call.exp_avg),
      .exp_avg_sq = static_cast<MomentStorage*>(call.exp_avg_sq),
      .master = static_cast<T*>(call.master),
      .scale = static_cast<const T*>(call.scale),
      .size = call.numel,
      .in_features = call.in_features,
      .adamw = AdamW<T>(call),
      .params = ProxParams<T>(call.reg_lambda),
      .prox = call.reg_lambda > 0,
      .stochastic = call.stochastic,
      .aligned = std::all_of(std::begin(tensors), std::end(tensors), is_aligned),
      .seed = call.seed,
  };
  return launch_warps(adamw_prox_kernel<Weight, Moment>, call.numel, kLanes * (sizeof(WeightStorage) == 2 ? 8 : 4),
                      arguments, stream);
}

template <typename Weight>
cudaError_t launch(const AdamWProxCall& call, cudaStream_t stream) {
  return call.moments_bfloat16 ? launch<Weight, BFloat16>(call, stream)
                               : launch<Weight, Native<typename Weight::Arithmetic>>(call, stream);
}

}  // namespace

cudaError_t launch_adamw_prox(const AdamWProxCall& call, cudaStream_t stream) {
  return with_format(call.dtype, [&](auto format) { return launch<decltype(format)>(call, stream); });
}

}  // namespace proxsparse::gpu
