// PROXSPARSE_INLINE, for the functions of the loops over blocks: no compiler vectorizes a loop with a call in it.
#pragma once

#ifdef __CUDACC__
#define PROXSPARSE_INLINE __host__ __device__ __forceinline__
#else
#define PROXSPARSE_INLINE inline __attribute__((always_inline))
#endif

#ifdef __CUDACC__
#define PROXSPARSE_UNROLL _Pragma("unroll")
#else
#define PROXSPARSE_UNROLL _Pragma("GCC unroll 8")
#endif

// The same source is compiled for several instruction sets. One namespace for each keeps the linker from merging them.
#ifndef PROXSPARSE_ISA
#define PROXSPARSE_ISA portable
#endif

namespace proxsparse {
inline namespace PROXSPARSE_ISA {

// The type of one number of T: T itself, unless T is a vector of numbers.
template <typename T>
struct ScalarOf {
  using Type = T;
};

}  // namespace PROXSPARSE_ISA
}  // namespace proxsparse
