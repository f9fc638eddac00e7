// Up to a hundred rows of x.
#include "sm80.h"

namespace proxsparse::gemm {
static const Registered registered(Sm80<64, 64, 32, 32, 4>::tile("64x64"));
}  // namespace proxsparse::gemm
