// The kernels for AVX-512 with bfloat16 dot products (BF16) and 16-bit expansion (VBMI2).
#include "standard.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx512bf16,fma,prefer-vector-width=512")
#define PROXSPARSE_ISA avx512_bf16
#define PROXSPARSE_VECTOR_BYTES 64
#define PROXSPARSE_BF16
#include "kernels_table.h"

const proxsparse::Kernels proxsparse::kAvx512Bf16Kernels = proxsparse::kKernels;
#endif
