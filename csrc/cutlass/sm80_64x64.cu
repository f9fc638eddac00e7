// Up to a hundred rows of x.
#include "sm80.h"

namespace proxsparse::gemm {
static const Registered registered(tile<Sm80<64, 64, 32, 32, 4>>("64x64"));
}  // namespace proxsparse::gemm
