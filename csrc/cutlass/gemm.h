// y = x W^T + bias by CUTLASS, for many rows of x: no torch and no CUTLASS here, so that every file can include it.
// One file holds one tile, because each takes a minute to compile; a tile that is linked puts itself into the list.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <vector>

namespace proxsparse::gemm {

// All of bfloat16 and 16-byte aligned. For CUTLASS W is A [out_features, in_features], x^T is B, and what it writes is
// D.
struct Call {
  const void* values;    // [out_features, in_features / 2]
  const void* metadata;  // csrc/cuda/metadata.cu
  const void* x;         // [rows, in_features]
  const void* bias;      // [out_features]; null means 0. Architecture 80 knows no bias
  void* y;               // [rows, out_features]; architecture 80: [out_features, rows]
  int out_features, rows, in_features;
  void* workspace;
};

struct Tile {
  const char* name;
  int architecture;                                           // 80: that and newer; 90: only that
  size_t (*workspace_bytes)(const Call& call);                // that `run` needs
  const char* (*run)(const Call& call, cudaStream_t stream);  // null, or what is wrong
};

inline std::vector<Tile>& tiles() {
  static std::vector<Tile> all;
  return all;
}

struct Registered {
  explicit Registered(const Tile& tile) { tiles().push_back(tile); }
};

}  // namespace proxsparse::gemm
