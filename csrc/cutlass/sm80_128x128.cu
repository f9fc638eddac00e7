// Hundreds of rows of x and more.
#include "sm80.h"

namespace proxsparse::gemm {
static const Registered registered(tile<Sm80<128, 128, 64, 64, 4>>("128x128"));
}  // namespace proxsparse::gemm
