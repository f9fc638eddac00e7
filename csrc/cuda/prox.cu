// The prox of 2:4 blocks in one pass over memory, in place.
#include <iterator>

#include "launch.h"
#include "solve.h"

namespace proxsparse::gpu {
namespace {

template <typename Format>
struct ProxArguments {
  using T = typename Format::Arithmetic;
  typename Format::Storage* weight;
  int64_t size, in_features;
  const T* scale;
  ProxParams<T> params;
};

// A lane holds 32 bytes, 16 from each half of the memory of its warp. This gives enough loads in flight, and enough
// blocks for full queues. Not tuned on a GPU.
template <typename Format>
struct LaneLayout {
  static constexpr int kPiece = sizeof(typename Format::Storage) == 2 ? 8 : 4;  // numbers
  static constexpr int kPieces = 32 / (kPiece * int{sizeof(typename Format::Storage)});
  static constexpr int kPieceBlocks = kPiece / 4, kBlocks = kPieces * kPieceBlocks;
  static constexpr int kWarpNumbers = 4 * kBlocks * kLanes;
};

// |c| of the block that starts at `column`.
template <typename T>
__device__ Block<T> scale_of(const T* scale, int64_t column) {
  return {std::abs(scale[column]), std::abs(scale[column + 1]), std::abs(scale[column + 2]),
          std::abs(scale[column + 3])};
}

// w / c; z if w = c * z, because the prox then did not change z.
template <typename T>
__device__ T unscaled(T w, T c, T z) {
  return w < c * z ? w / c : z;
}

template <typename Format, bool kScaled>
__global__ void __launch_bounds__(kWarps* kLanes) prox_kernel(ProxArguments<Format> call) {
  using T = typename Format::Arithmetic;
  using Storage = typename Format::Storage;
  using S = LaneLayout<Format>;
  __shared__ WarpBlocks<T, S::kBlocks * kLanes> shared[kWarps];

  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kWarps + warp()) * S::kWarpNumbers;
  const WarpTile<Storage, S::kPieces, S::kPiece> tile(call.weight, first, call.size, &shared[warp()]);
  Piece<Storage, S::kPiece> pieces[S::kPieces];
  tile.load(pieces);

  const auto weights = [&](int b) {
    auto& words = pieces[b / S::kPieceBlocks].words.word;
    return words + b % S::kPieceBlocks * (std::size(words) / S::kPieceBlocks);
  };
  const auto column = [&](int b) {
    return (first + tile.offset(b / S::kPieceBlocks) + b % S::kPieceBlocks * 4) % call.in_features;
  };
  const auto scaled_magnitudes = [&](int b) {
    Block<T> z = magnitudes(Format(), weights(b));
    if constexpr (kScaled) {
      const Block<T> c = scale_of(call.scale, column(b));
      z = {c.w1 * z.w1, c.w2 * z.w2, c.w3 * z.w3, c.w4 * z.w4};
    }
    return z;
  };
  const auto shrink_weights = [&](int b, Block<T> w) {
    if constexpr (kScaled) {
      const Block<T> z = magnitudes(Format(), weights(b)), c = scale_of(call.scale, column(b));
      w = {unscaled(w.w1, c.w1, z.w1), unscaled(w.w2, c.w2, z.w2), unscaled(w.w3, c.w3, z.w3),
           unscaled(w.w4, c.w4, z.w4)};
    }
    shrink(Format(), weights(b), w);
  };
  solve_blocks<Format, S::kBlocks, S::kPieceBlocks>(shared[warp()], call.params, scaled_magnitudes, shrink_weights);

  tile.store(pieces);
}

template <typename Format>
cudaError_t launch(const ProxCall& call, cudaStream_t stream) {
  using T = typename Format::Arithmetic;
  const ProxArguments<Format> arguments{static_cast<typename Format::Storage*>(call.weight), call.numel,
                                        call.in_features, static_cast<const T*>(call.scale),
                                        ProxParams<T>(call.reg_lambda)};
  return launch_warps(call.scale ? prox_kernel<Format, true> : prox_kernel<Format, false>, call.numel,
                      LaneLayout<Format>::kWarpNumbers, arguments, stream);
}

}  // namespace

cudaError_t launch_prox(const ProxCall& call, cudaStream_t stream) {
  return with_format(call.dtype, [&](auto format) { return launch<decltype(format)>(call, stream); });
}

}  // namespace proxsparse::gpu
