// The loops of the CPU kernels, free of torch: compiled once for each instruction set, chosen when they are called.
#pragma once

#include <cstdint>

namespace proxsparse {

constexpr int kChunk = 256;  // blocks that are solved together: what they need fits the first-level cache
constexpr int64_t kChunkWeights = 4 * kChunk;

enum Dtype { kFloat32, kFloat64, kBFloat16, kFloat16, kDtypes };

struct ProxArguments {
  void* weight;       // [numel], in rows of in_features
  const void* scale;  // [in_features] in the arithmetic of the format, or null
  int64_t numel, in_features;
  double reg_lambda;  // > 0
  int64_t n;
};

struct MaskArguments {
  const void* score;
  bool* mask;
  int64_t n;
};

// Each for the chunks, or blocks, from begin to end.
struct Kernels {
  void (*prox[kDtypes])(const ProxArguments&, int64_t begin, int64_t end);
  void (*mask[kDtypes])(const MaskArguments&, int64_t begin, int64_t end);
};

extern const Kernels kDefaultKernels, kAvx2Kernels, kAvx512Kernels;

// Those for the widest vectors of this CPU, at most PROXSPARSE_CPU_CAPABILITY=default|avx2|avx512 of the environment.
const Kernels& kernels();

}  // namespace proxsparse
