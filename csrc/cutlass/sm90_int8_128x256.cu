// Hundreds of rows of x and more; the two thread blocks of a cluster share them.
#include "sm90_codes.h"

namespace proxsparse::gemm {
using Chosen = Sm90<Int8, 128, 256, 2, cutlass::gemm::KernelTmaWarpSpecializedCooperative,
                    cutlass::epilogue::TmaWarpSpecializedCooperative>;
static const Registered registered(tile<Chosen>("int8_128x256"));
}  // namespace proxsparse::gemm
