// Two tiles of a thread block take turns: up to a hundred rows of x.
#include "sm90.h"

namespace proxsparse::gemm {
using Chosen = Sm90<64, 64, 1, cutlass::gemm::KernelTmaWarpSpecializedPingpong, cutlass::epilogue::TmaWarpSpecialized>;
static const Registered registered(tile<Chosen>("64x64"));
}  // namespace proxsparse::gemm
