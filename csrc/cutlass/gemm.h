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

struct Tile {
  const char* name;
  int architecture;                                           // 80: 8.0 and newer; 90: only 9.0
  size_t (*workspace_bytes)(const Call& call);                // needed by `run`
  const char* (*run)(const Call& call, cudaStream_t stream);  // null, or the error
};

inline std::vector<Tile>& tiles() {
  static std::vector<Tile> all;
  return all;
}

struct Registered {
  explicit Registered(const Tile& tile) { tiles().push_back(tile); }
};

}  // namespace proxsparse::gemm
