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

struct AdamWProxArguments {
  void* weight;            // [numel], in rows of in_features
  const void* grad;        // as the weight
  void* exp_avg;           // [numel], in the arithmetic of the weight's dtype or in bfloat16
  void* exp_avg_sq;        // as exp_avg
  float* master;           // [numel], or null: the weight is all there is
  const void* pretrained;  // as the weight, or null: no frozen-weight term
  const void* scale;       // [in_features] in the arithmetic, or null
  int64_t numel, in_features;
  double lr, beta1, beta2, eps, decay;  // decay: what is left of a weight, 1 - lr * weight_decay
  double correction1, correction2;      // 1 / (1 - beta1^t), 1 / sqrt(1 - beta2^t)
  double reg_lambda;                    // 0: no prox
  int64_t n;
  double frozen_lambda, frozen_eps;
  bool stochastic;  // how to round to bfloat16
  uint64_t seed;
};

struct MaskArguments {
  const void* score;
  bool* mask;
  int64_t n;
};

// proxsparse/reference/pack.py describes the form.
struct PackArguments {
  const void* weight;  // [rows, in_features]
  void* values;        // [rows, in_features * n / 4]
  uint8_t* indices;    // [rows, ceil(in_features * n / 16)]
  int64_t in_features;
};

struct UnpackArguments {
  const void* values;      // [rows, in_features * n / 4]
  const uint8_t* indices;  // [rows, ceil(in_features * n / 16)]
  void* weight;            // [rows, in_features]
  int64_t in_features;
};

struct LinearArguments {
  const void* x;       // [rows, in_features], as the values if they are bfloat16 and `Kernels` says so, else float32
  const void* values;  // [out_features, in_features / 2]
  const uint8_t* indices;  // [out_features, ceil(in_features / 8)]
  const void* bias;        // [out_features] as the values, or null
  void* y;                 // [rows, out_features] as the values
  int64_t rows, in_features, out_features;
};

constexpr int kTile = 4;  // output features that are computed together

// Each for the chunks, blocks, rows of the weight or tiles of output features from begin to end.
struct Kernels {
  void (*prox[kDtypes])(const ProxArguments&, int64_t begin, int64_t end);
  void (*adamw_prox[kDtypes])(const AdamWProxArguments&, int64_t begin, int64_t end);
  void (*adamw_prox_bfloat16_moments[kDtypes])(const AdamWProxArguments&, int64_t begin, int64_t end);
  void (*mask[kDtypes])(const MaskArguments&, int64_t begin, int64_t end);
  void (*unpack_24[kDtypes])(const UnpackArguments&, int64_t begin, int64_t end);
  void (*linear[kDtypes])(const LinearArguments&, int64_t begin, int64_t end);
  bool linear_reads_bfloat16;  // x, beside bfloat16 values
};

extern const Kernels kDefaultKernels, kAvx2Kernels, kAvx512Kernels, kAvx512Bf16Kernels;

// Those for the widest vectors of this CPU, at most PROXSPARSE_CPU_CAPABILITY=default|avx2|avx512|avx512_bf16 of the
// environment.
const Kernels& kernels();

}  // namespace proxsparse
