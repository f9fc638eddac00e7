// More than a hundred rows of x.
#include "sm80_int8.h"

namespace proxsparse::gemm {
static const Registered registered(tile<Sm80Int8<128, 128, 64, 64, 3>>("int8_128x128"));
}  // namespace proxsparse::gemm
