// The kernels as functions of pointers and sizes. They do not need torch, so they compile anywhere, in seconds.
// Every pointer is to memory of the current device. No function waits for the GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../calls.h"
#include "../codes.h"

namespace proxsparse::gpu {

cudaError_t launch_prox(const ProxCall& call, cudaStream_t stream);
cudaError_t launch_adamw_prox(const AdamWProxCall& call, cudaStream_t stream);
cudaError_t launch_masked_weight(const MaskedWeightCall& call, cudaStream_t stream);

// y = x W^T + bias with a packed 2:4 W [out_features, in_features] (proxsparse/reference/pack.py). in_features are its
// columns, which the windows of the other patterns multiply (proxsparse/reference/windows.py).
struct GemvCall {
  const void* x;                        // [rows, x_features]; 8-byte aligned
  const void* values;                   // [out_features, in_features / 2] numbers or codes
  const uint8_t* indices;               // [out_features, ceil(in_features / 8)]
  const void* bias;                     // [out_features]; null means 0
  void* y;                              // [rows, out_features]
  int rows, out_features, in_features;  // rows: 1 to 16; in_features: a multiple of 4
  int x_features, m;                    // in_features and 4, except for windows; both are even
  Dtype dtype;                          // of all numbers: kBFloat16 or kFloat16; the sums are float32
  Codes codes;                          // how values are stored (proxsparse/reference/quantize.py)
  const void* scales;  // of the dtype: [out_features] for kInt8, [out_features, ceil(in_features / 64)] for kInt4
  // Set by launch_gemv.
  int warps;            // of a thread block, 1 to 16
  int splits;           // of the columns of W, over the thread blocks of a cluster, 1 to 8
  uint32_t x_blocks;    // blocks of m in a row of x
  uint32_t reciprocal;  // 2^31 / windows of a block, rounded up
};
cudaError_t launch_gemv(const GemvCall& call, cudaStream_t stream);

// Packs a 2:4 weight whose numbers have 2 or 4 bytes; every row begins at a multiple of a block. *infeasible becomes 1
// if a block has more than two nonzeros.
cudaError_t launch_pack(const PackCall& call, int bytes_of_weight, int* infeasible, cudaStream_t stream);
// The inverse.
cudaError_t launch_unpack(const PackCall& call, int bytes_of_weight, cudaStream_t stream);

// Writes the places of a packed weight in the order that CUTLASS's kernels read.
struct MetadataCall {
  const uint8_t* indices;  // [out_features, in_features / 8]
  // 16-byte aligned. 80: out_features * in_features / 8 bytes; 90: the same after rounding up to multiples of 64 and
  // 128
  uint8_t* metadata;
  int out_features;  // 80: a multiple of 32
  int in_features;   // 80: a multiple of 64; 90: of 16
  int architecture;  // 80 or 90
};
cudaError_t launch_metadata(const MetadataCall& call, cudaStream_t stream);

}  // namespace proxsparse::gpu
