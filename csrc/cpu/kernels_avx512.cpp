// The kernels for AVX-512.
#include "standard.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")
#define PROXSPARSE_ISA avx512
#define PROXSPARSE_VECTOR_BYTES 64
#include "kernels_table.h"

const proxsparse::Kernels proxsparse::kAvx512Kernels = proxsparse::kKernels;
#endif
