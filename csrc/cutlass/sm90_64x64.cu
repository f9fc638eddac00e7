// Up to a hundred rows of x. Two tiles of a thread block alternate (ping-pong).
#include "sm90.h"

namespace proxsparse::gemm {
using Chosen = Sm90<64, 64, 1, cutlass::gemm::KernelTmaWarpSpecializedPingpong, cutlass::epilogue::TmaWarpSpecialized>;
static const Registered registered(tile<Chosen>("64x64"));
}  // namespace proxsparse::gemm
