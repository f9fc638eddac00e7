// The instructions of the gemv that exist only in PTX. The tests replace those inside #ifdef __CUDACC__.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "number.h"

namespace proxsparse::gpu {

constexpr uint32_t kAnyPlaces = 0x44444444u;  // places 0 and 1 of every block, for blocks after the end

struct alignas(16) Words4 {
  uint32_t word[4];
};
struct alignas(8) Words2 {
  uint32_t word[2];
};

// For data that is read only once: it does not evict x from the L1 cache.
__device__ inline Words4 load_once(const Words4* source) {
#ifdef __CUDA_ARCH__
  Words4 got;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(got.word[0]), "=r"(got.word[1]), "=r"(got.word[2]), "=r"(got.word[3])
               : "l"(source));
  return got;
#else
  return *source;
#endif
}
__device__ inline Words2 load_once(const Words2* source) {
#ifdef __CUDA_ARCH__
  Words2 got;
  asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(got.word[0]), "=r"(got.word[1]) : "l"(source));
  return got;
#else
  return *source;
#endif
}

// A scale, which the other lanes of a row and the next steps read as well, so that it stays in the L1 cache.
__device__ inline uint32_t load_scale(const uint16_t* source) {
#ifdef __CUDA_ARCH__
  uint16_t got;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(got) : "l"(source));
  return got;
#else
  return *source;
#endif
}

#ifdef __CUDACC__
// D += A B by a warp: A [16, 32] 2:4, B [32, 8], D [16, 8] in fp32 (PTX ISA, "mma.sp", m16n8k32). Lane 4g+q holds
//   a        the two values of block q of row g, of block q of row g+8, of block q+4 of each
//   b        rows 2q+8t and 2q+8t+1 of column g, t = 0 to 3
//   places   of four blocks, a nibble each: row g in the lower half, row g+8 in the upper; read only from lanes with
//            q = 2 kSelector (blocks 0 to 3) and q = 2 kSelector + 1 (blocks 4 to 7)
//   d        columns 2q and 2q+1 of row g, then of row g+8
#define PROXSPARSE_MMA_SP(type)                                                                                       \
  asm volatile("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32." type "." type                            \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;"             \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(places), \
                 "n"(kSelector))
template <int kSelector>
__device__ inline void mma_sp(BFloat16, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[4],
                              uint32_t places) {
  PROXSPARSE_MMA_SP("bf16");
}
template <int kSelector>
__device__ inline void mma_sp(Float16, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[4], uint32_t places) {
  PROXSPARSE_MMA_SP("f16");
}
#undef PROXSPARSE_MMA_SP

__device__ inline char* dynamic_shared() {
  extern __shared__ Words4 memory[];
  return reinterpret_cast<char*>(memory);
}
__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Loads four 8x8 matrices of 16-bit numbers from shared memory. Lane 8t+r provides the address of row r of matrix t, 16
// bytes. Lane 4g+q receives numbers 2q and 2q+1 of row g of each matrix.
__device__ inline Words4 load_matrices(const uint32_t* row) {
  Words4 got;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(got.word[0]), "=r"(got.word[1]), "=r"(got.word[2]), "=r"(got.word[3])
               : "r"(shared_address(row))
               : "memory");
  return got;
}

// Starts to copy 4 or 8 bytes from global to shared memory; zeros unless `exists`. Both must be as aligned.
template <int kBytes>
__device__ inline void copy_bytes(uint32_t* shared, const uint16_t* global, bool exists) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(shared)), "l"(global), "n"(kBytes),
               "r"(exists ? kBytes : 0)
               : "memory");
}
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }  // of this thread

// Synchronises the kWarps warps with index / kWarps == group. At most 8 groups in a thread block.
template <int kWarps>
__device__ inline void sync_warps(int group) {
  if (kWarps == 1) return __syncwarp();
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(kWarps * 32) : "memory");  // barrier 0 is __syncthreads
}

// Barriers of a cluster, whose thread blocks can read each other's shared memory (compute capability 9.0). After
// cluster_sync all earlier writes are visible, which costs a fence for the whole GPU (MEMBAR.ALL.GPU).
// cluster_arrive_wait only waits for all threads.
__device__ inline void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
#endif
}
__device__ inline void cluster_arrive_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed;\n\tbarrier.cluster.wait;" ::: "memory");
#endif
}
__device__ inline float load_from_block(const float* shared, int rank) {
  float value = *shared;
#if __CUDA_ARCH__ >= 900
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(shared)), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
#endif
  return value;
}
#endif

// The same for a selector that is known after loop unrolling.
template <typename Format>
__device__ inline void mma_sp(Format format, int selector, float (&d)[4], const uint32_t (&a)[4],
                              const uint32_t (&b)[4], uint32_t places) {
  selector ? mma_sp<1>(format, d, a, b, places) : mma_sp<0>(format, d, a, b, places);
}

}  // namespace proxsparse::gpu
