// Up to a hundred rows of x, and so few out_features that y has fewer tiles than the GPU has multiprocessors. Stream-K
// splits in_features between thread blocks, which add their fp32 partial sums in the workspace in a fixed order. If the
// tiles of y fill the GPU, CUTLASS's heuristic does not split.
#include "sm90.h"

namespace proxsparse::gemm {
using Chosen = Sm90<128, 64, 1, cutlass::gemm::KernelTmaWarpSpecializedCooperative,
                    cutlass::epilogue::TmaWarpSpecializedCooperative, cutlass::gemm::StreamKScheduler>;
static const Registered registered(tile<Chosen>("128x64_streamk"));
}  // namespace proxsparse::gemm
