// The kernels of the gemv (gemv.h) for codes of 4 bits on a grid.
#include "gemv.h"

template cudaError_t proxsparse::gpu::launch<proxsparse::gpu::Bits4OnGrid>(const GemvPlan& plan, cudaStream_t stream);
