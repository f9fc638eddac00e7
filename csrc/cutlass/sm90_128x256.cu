// Thousands of rows of x; two thread blocks share them.
#include "sm90.h"

namespace proxsparse::gemm {
using Chosen = Sm90<128, 256, 2, cutlass::gemm::KernelTmaWarpSpecializedCooperative,
                    cutlass::epilogue::TmaWarpSpecializedCooperative>;
static const Registered registered(tile<Chosen>("128x256"));
}  // namespace proxsparse::gemm
