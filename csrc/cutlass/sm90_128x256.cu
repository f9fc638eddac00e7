// Thousands of rows of x; the two thread blocks of a cluster share them.
#include "sm90.h"

namespace proxsparse::gemm {
using Chosen = Sm90<128, 256, 2, cutlass::gemm::KernelTmaWarpSpecializedCooperative,
                    cutlass::epilogue::TmaWarpSpecializedCooperative>;
static const Registered registered(tile<Chosen>("128x256"));
}  // namespace proxsparse::gemm
