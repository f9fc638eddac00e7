// What the loops over blocks need of a function: inlined without exception, or no compiler makes vector code of them.
#pragma once

#ifdef __CUDACC__
#define PROXSPARSE_INLINE __host__ __device__ __forceinline__
#else
#define PROXSPARSE_INLINE inline __attribute__((always_inline))
#endif

// The same source compiled for several instruction sets must not meet itself under one name in the linker.
#ifndef PROXSPARSE_ISA
#define PROXSPARSE_ISA portable
#endif

namespace proxsparse {
inline namespace PROXSPARSE_ISA {

// The type of one number of T, which is T itself unless T is a vector of numbers.
template <typename T>
struct ScalarOf {
  using Type = T;
};

}  // namespace PROXSPARSE_ISA
}  // namespace proxsparse
