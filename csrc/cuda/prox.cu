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
  int64_t size;
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

template <typename Format>
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
  const auto magnitudes_of = [&](int b) { return magnitudes(Format(), weights(b)); };
  const auto shrink_weights = [&](int b, Block<T> w) { shrink(Format(), weights(b), w); };
  solve_blocks<Format, S::kBlocks, S::kPieceBlocks>(shared[warp()], call.params, magnitudes_of, shrink_weights);

  tile.store(pieces);
}

template <typename Format>
cudaError_t launch(const ProxCall& call, cudaStream_t stream) {
  const ProxArguments<Format> arguments{static_cast<typename Format::Storage*>(call.weight), call.numel,
                                        ProxParams<typename Format::Arithmetic>(call.reg_lambda)};
  return launch_warps(prox_kernel<Format>, call.numel, LaneLayout<Format>::kWarpNumbers, arguments, stream);
}

}  // namespace

cudaError_t launch_prox(const ProxCall& call, cudaStream_t stream) {
  return with_format(call.dtype, [&](auto format) { return launch<decltype(format)>(call, stream); });
}

}  // namespace proxsparse::gpu
