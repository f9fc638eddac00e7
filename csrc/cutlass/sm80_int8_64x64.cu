// Up to a hundred rows of x.
#include "sm80_int8.h"

namespace proxsparse::gemm {
static const Registered registered(tile<Sm80Int8<64, 64, 32, 32, 4>>("int8_64x64"));
}  // namespace proxsparse::gemm
