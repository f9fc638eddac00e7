// The kernels for AVX2.
#include "standard.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx2,fma")
#define PROXSPARSE_ISA avx2
#define PROXSPARSE_VECTOR_BYTES 32
#include "kernels_table.h"

const proxsparse::Kernels proxsparse::kAvx2Kernels = proxsparse::kKernels;
#endif
