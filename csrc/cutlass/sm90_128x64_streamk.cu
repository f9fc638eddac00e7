// Up to a hundred rows of x and few out_features, so that the tiles of y are fewer than the multiprocessors: stream-K
// splits in_features between thread blocks, which add up their fp32 partial sums in a fixed order in the workspace.
// Where the tiles of y fill the GPU, CUTLASS's heuristic splits nothing.
#include "sm90.h"

namespace proxsparse::gemm {
using Chosen = Sm90<128, 64, 1, cutlass::gemm::KernelTmaWarpSpecializedCooperative,
                    cutlass::epilogue::TmaWarpSpecializedCooperative, cutlass::gemm::StreamKScheduler>;
static const Registered registered(tile<Chosen>("128x64_streamk"));
}  // namespace proxsparse::gemm
