// The kernels of the gemv (gemv.h) for codes of 8 bits.
#include "gemv.h"

template cudaError_t proxsparse::gpu::launch<proxsparse::gpu::Bits8>(const GemvPlan& plan, cudaStream_t stream);
