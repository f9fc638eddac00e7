// Up to two hundred rows of x. Two tiles of a thread block alternate (ping-pong).
#include "sm90_codes.h"

namespace proxsparse::gemm {
using Chosen =
    Sm90<Fp8, 64, 64, 1, cutlass::gemm::KernelTmaWarpSpecializedPingpong, cutlass::epilogue::TmaWarpSpecialized>;
static const Registered registered(tile<Chosen>("fp8_64x64"));
}  // namespace proxsparse::gemm
