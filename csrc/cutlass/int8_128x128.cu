// More than a hundred rows of x.
#include "int8.h"

namespace proxsparse::gemm {
static const Registered registered(tile<Int8<128, 128, 64, 64, 3>>("128x128"));
}  // namespace proxsparse::gemm
