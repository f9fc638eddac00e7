// Up to a few dozen rows of x.
#include "sm90.h"

namespace proxsparse::gemm {
using Chosen = Sm90<64, 32, 1, cutlass::gemm::KernelTmaWarpSpecialized, cutlass::epilogue::TmaWarpSpecialized>;
static const Registered registered(tile<Chosen>("64x32"));
}  // namespace proxsparse::gemm
