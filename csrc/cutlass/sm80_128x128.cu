// Hundreds of rows of x and more. With 4 stages it would need 102,400 bytes of shared memory: more than GPUs of compute
// capability 8.6, 8.9 and 12.0 have for a thread block.
#include "sm80.h"

namespace proxsparse::gemm {
static const Registered registered(tile<Sm80<128, 128, 64, 64, 3>>("128x128"));
}  // namespace proxsparse::gemm
