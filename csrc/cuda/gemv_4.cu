// The kernels of the gemv (gemv.h) for codes of 4 bits.
#include "gemv.h"

template cudaError_t proxsparse::gpu::launch<proxsparse::gpu::Bits4>(const GemvPlan& plan, cudaStream_t stream);
