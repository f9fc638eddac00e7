// What the loops over blocks need of a function: inlined without exception, or no compiler makes vector code of them.
#pragma once

#ifdef __CUDACC__
#define PROXSPARSE_INLINE __host__ __device__ __forceinline__
#else
#define PROXSPARSE_INLINE inline __attribute__((always_inline))
#endif
