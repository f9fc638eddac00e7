// Up to a hundred rows of x.
#include "int8.h"

namespace proxsparse::gemm {
static const Registered registered(tile<Int8<64, 64, 32, 32, 4>>("64x64"));
}  // namespace proxsparse::gemm
