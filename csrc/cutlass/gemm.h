// y = x W^T + bias with CUTLASS, for many rows of x. This header needs neither torch nor CUTLASS. Each tile has a file
// of its own, because it takes a minute to compile; a linked tile adds itself to the list.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <vector>

namespace proxsparse::gemm {

// All tensors are bfloat16 and 16-byte aligned. In CUTLASS's terms, W is A [out_features, in_features], x^T is B, and
// the result is D.
struct Call {
  const void* values;    // [out_features, in_features / 2]
  const void* metadata;  // csrc/cuda/metadata.cu
  const void* x;         // [rows, in_features]
  const void* bias;      // [out_features]; null means 0. Architecture 80 does not support it
  void* y;               // [rows, out_features]; architecture 80: [out_features, rows]
  int out_features, rows, in_features;
  void* workspace;
};

// The same for codes of 8 bits, of W and of x: int8 or e4m3, the prefix of the tile's name is int8_ or fp8_.
struct CodesCall {
  const void* values;     // codes [out_features, in_features / 2]
  const void* metadata;   // proxsparse/ops/backends/cutlass_codes.py
  const void* x;          // codes [rows, in_features]
  const void* scales;     // [out_features], bfloat16 for int8, float for e4m3
  const float* x_scales;  // [rows]
  const void* bias;       // bfloat16 [out_features]; null means 0
  void* y;                // bfloat16 [rows, out_features]; architecture 80: [out_features, rows]
  int out_features, rows, in_features;
  void* workspace;
};

template <typename Call>
struct TileOf {
  const char* name;
  int architecture;                                           // 80: 8.0 and newer; 90: only 9.0
  size_t (*workspace_bytes)(const Call& call);                // needed by `run`
  const char* (*run)(const Call& call, cudaStream_t stream);  // null, or the error
};

using Tile = TileOf<Call>;

template <typename Call>
std::vector<TileOf<Call>>& tiles() {
  static std::vector<TileOf<Call>> all;
  return all;
}

struct Registered {
  template <typename Call>
  explicit Registered(const TileOf<Call>& tile) {
    tiles<Call>().push_back(tile);
  }
};

}  // namespace proxsparse::gemm
