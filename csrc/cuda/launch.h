// The kernels as plain functions of pointers and sizes: no torch, so that they compile anywhere, in seconds.
// Every pointer is to the memory of the current device; no function waits for the GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace proxsparse::gpu {

enum class Type { kFloat32, kFloat64, kBFloat16, kFloat16 };

// W <- argmin_V 1/2 |V - c W|^2 + reg_lambda * Reg_{n:4}(V), divided back by c, in place.
struct ProxCall {
  void* weight;         // [size], of `type`; any alignment of its own numbers, 16 bytes are fast
  int64_t size;         // a multiple of 4
  int64_t in_features;  // a multiple of 4; used with a scale
  const void* scale;    // c, [in_features], float64 for a float64 weight, float32 otherwise; null means 1
  Type type;
  double reg_lambda;  // > 0
  int n;              // weights kept of every 4: 1 or 2
};
cudaError_t launch_prox(const ProxCall& call, cudaStream_t stream);

// A step of AdamW, then the prox; `adamw_prox` of proxsparse/reference/ holds the equations. A is float64 for a
// float64 weight and float32 otherwise.
struct AdamWProxCall {
  void *weight, *exp_avg, *exp_avg_sq;  // [size]; changed in place
  void* master;                         // [size] of A, changed in place; null: the weight is all there is
  const void *grad, *pretrained;        // [size] of `type`; pretrained is needed for frozen_lambda > 0
  const void* scale;                    // c, [in_features] of A; null means 1
  int64_t size, in_features;            // multiples of 4 if reg_lambda > 0
  Type type;                            // of the weight
  bool moments_bfloat16;                // else they are of A
  int64_t step;                         // counted from 1
  double lr, beta1, beta2, eps, weight_decay;
  double reg_lambda;  // 0: AdamW alone
  int n;              // weights kept of every 4: 1 or 2
  double frozen_lambda, frozen_eps;
  bool stochastic;  // rounding to bfloat16, with the bits of `seed`
  uint64_t seed;
};
cudaError_t launch_adamw_prox(const AdamWProxCall& call, cudaStream_t stream);

// y = x W^T + bias, W [out_features, in_features] 2:4 and packed (proxsparse/reference/pack.py).
struct GemvCall {
  const void* x;                        // [rows, in_features]; 8-byte aligned
  const void* values;                   // [out_features, in_features / 2]
  const uint8_t* indices;               // [out_features, ceil(in_features / 8)]
  const void* bias;                     // [out_features]; null means 0
  void* y;                              // [rows, out_features]
  int rows, out_features, in_features;  // rows: 1 to 16; in_features: a multiple of 4
  Type type;                            // of all numbers: kBFloat16 or kFloat16; the sums are float32
  // How it is launched; 0: the kernel's own choice. A number that the GPU cannot run is replaced by the nearest it can.
  int warps;   // of a thread block, 1 to 16
  int splits;  // of the columns of W, over the thread blocks of a cluster, 1 to 8; 1 before compute capability 9.0
  int tiles;   // of 8 rows of W in each warp: 1, 2 or 4
  // May start before the previous kernel of the stream has ended, and load weights. Only where no kernel that may still
  // run writes values or indices. Nothing changes before compute capability 9.0.
  bool dependent;
};
cudaError_t launch_gemv(const GemvCall& call, cudaStream_t stream);

// A 2:4 weight to its packed form, or back; every row begins at a multiple of a block.
struct PackCall {
  void* weight;         // [rows, in_features]
  void* values;         // [rows, in_features / 2]
  uint8_t* indices;     // [rows, ceil(in_features / 8)]
  int* infeasible;      // one number: becomes 1 if a block has more than two nonzeros. Null: unpack
  int64_t rows;         // > 0
  int in_features;      // > 0, a multiple of 4
  int bytes_of_weight;  // 2 or 4
};
cudaError_t launch_pack(const PackCall& call, cudaStream_t stream);

// The places of a packed weight in the order of CUTLASS's kernels.
struct MetadataCall {
  const uint8_t* indices;  // [out_features, in_features / 8]
  uint8_t* metadata;  // 16-byte aligned. 80: out_features * in_features / 8 bytes; 90: the same of multiples of 64, 128
  int out_features;   // 80: a multiple of 32
  int in_features;    // 80: a multiple of 64; 90: of 16
  int architecture;   // 80 or 90
};
cudaError_t launch_metadata(const MetadataCall& call, cudaStream_t stream);

}  // namespace proxsparse::gpu
