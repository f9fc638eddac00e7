// Hundreds of rows of x.
#include "sm90.h"

namespace proxsparse::gemm {
using Chosen = Sm90<128, 128, 1, cutlass::gemm::KernelTmaWarpSpecializedCooperative,
                    cutlass::epilogue::TmaWarpSpecializedCooperative>;
static const Registered registered(tile<Chosen>("128x128"));
}  // namespace proxsparse::gemm
