// Up to two hundred rows of x. Two tiles of a thread block alternate (ping-pong).
#include "sm90_codes.h"

namespace proxsparse::gemm {
using Chosen =
    Sm90<Int8, 64, 64, 1, cutlass::gemm::KernelTmaWarpSpecializedPingpong, cutlass::epilogue::TmaWarpSpecialized>;
static const Registered registered(tile<Chosen>("int8_64x64"));
}  // namespace proxsparse::gemm
