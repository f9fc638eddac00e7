// W0 under the mask of a learned weight, for 2:4 blocks: one pass over memory.
#include "../block_ranks.h"
#include "launch.h"
#include "number.h"

namespace proxsparse::gpu {
namespace {

__device__ bool is_aligned(const void* tensor) { return reinterpret_cast<uintptr_t>(tensor) % 16 == 0; }

// A lane holds 16 bytes of W0 (32 if it is float64). Not tuned on a GPU.
template <typename Pretrained>
constexpr int kPieceOf = sizeof(typename Pretrained::Storage) == 2 ? 8 : 4;

// c of the numbers from `position` on; 1 without a scale.
template <typename T, int kCount>
__device__ void load_scale(const T* scale, int64_t position, int64_t in_features, bool direct, T (&c)[kCount]) {
  using Four = typename Piece<T, 4>::Words;
  PROXSPARSE_UNROLL
  for (int i = 0; i < kCount; ++i) c[i] = 1;
  if (!scale) return;
  int64_t column = position % in_features;
  PROXSPARSE_UNROLL
  for (int i = 0; i < kCount; i += 4) {  // a block lies in one row
    const Four four = direct ? *reinterpret_cast<const Four*>(scale + column)
                             : Four{scale[column], scale[column + 1], scale[column + 2], scale[column + 3]};
    PROXSPARSE_UNROLL
    for (int j = 0; j < 4; ++j) c[i + j] = four.word[j];
    column = column + 4 == in_features ? 0 : column + 4;
  }
}

template <typename Weight, typename Pretrained>
__global__ void __launch_bounds__(kWarps* kLanes) masked_weight_kernel(MaskedWeightCall call) {
  using T = typename Weight::Arithmetic;
  using Storage = typename Weight::Storage;
  constexpr int kPiece = kPieceOf<Pretrained>;
  using Numbers = Piece<Storage, kPiece>;
  __shared__ typename Numbers::Words shared[kWarps][kLanes];

  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kWarps + warp()) * kPiece * kLanes;
  Numbers weight;
  Piece<typename Pretrained::Storage, kPiece> pretrained, out;
  T c[kPiece];
  const auto load = [&](bool direct) {  // both tensors before the first use of either: a warp waits for memory once
    const WarpRange range{first, call.numel, shared[warp()], direct};
    load_piece(static_cast<const Storage*>(call.weight), range, weight);
    load_piece(static_cast<const typename Pretrained::Storage*>(call.pretrained), range, pretrained);
    load_scale(static_cast<const T*>(call.scale), first + lane() * kPiece, call.in_features, direct, c);
  };
  const bool direct = is_aligned(call.out) && is_aligned(call.weight) && is_aligned(call.pretrained) &&
                      is_aligned(call.scale) && first + kPiece * kLanes <= call.numel;
  if (direct) {
    load(true);
  } else {
    load(false);
  }

  T score[kPiece], w0[kPiece];
  unpack(Weight(), weight, score);
  unpack(Pretrained(), pretrained, w0);
  PROXSPARSE_UNROLL
  for (int i = 0; i < kPiece; ++i) score[i] = times_sign(score[i] * c[i], w0[i]);
  const T first_dropped(1.5);
  PROXSPARSE_UNROLL
  for (int i = 0; i < kPiece; i += 4) {
    const Ranks<T> rank = rank_scores<T>({score[i], score[i + 1], score[i + 2], score[i + 3]});
    const bool kept[4] = {rank.r1 < first_dropped, rank.r2 < first_dropped, rank.r3 < first_dropped,
                          rank.r4 < first_dropped};
    PROXSPARSE_UNROLL
    for (int j = 0; j < 4; ++j) {
      if constexpr (sizeof(typename Pretrained::Storage) > 2) {
        out.words.word[i + j] = kept[j] ? w0[i + j] : T(0);
      } else if (j % 2 == 0) {
        const uint32_t bits = (kept[j] ? 0xffffu : 0) | (kept[j + 1] ? 0xffff0000u : 0);
        out.words.word[(i + j) / 2] = pretrained.words.word[(i + j) / 2] & bits;
      }
    }
  }
  store_piece(out, {first, call.numel, shared[warp()], direct}, static_cast<typename Pretrained::Storage*>(call.out));
}

template <typename Weight, typename Pretrained>
cudaError_t launch(const MaskedWeightCall& call, cudaStream_t stream) {
  return launch_warps(masked_weight_kernel<Weight, Pretrained>, call.numel, kLanes * kPieceOf<Pretrained>, call,
                      stream);
}

}  // namespace

cudaError_t launch_masked_weight(const MaskedWeightCall& call, cudaStream_t stream) {
  if (call.dtype == kFloat32 && call.pretrained_bfloat16) return launch<Float32, BFloat16>(call, stream);
  return with_format(call.dtype, [&](auto format) {
    using Format = decltype(format);
    return launch<Format, Format>(call, stream);
  });
}

}  // namespace proxsparse::gpu
