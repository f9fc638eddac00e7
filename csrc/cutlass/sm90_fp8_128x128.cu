// Hundreds of rows of x and more. The two sums of each number leave no registers for larger tiles.
#include "sm90_codes.h"

namespace proxsparse::gemm {
using Chosen = Sm90<Fp8, 128, 128, 1, cutlass::gemm::KernelTmaWarpSpecializedCooperative,
                    cutlass::epilogue::TmaWarpSpecializedCooperative>;
static const Registered registered(tile<Chosen>("fp8_128x128"));
}  // namespace proxsparse::gemm
