// The arguments of the kernels on the CPU and on the GPU, as pointers and sizes without torch. checks.h fills them in.
// All tensors are contiguous. A, the dtype of the arithmetic, is float64 for a float64 weight and float32 otherwise.
#pragma once

#include <cstdint>

namespace proxsparse {

enum Dtype { kFloat32, kFloat64, kBFloat16, kFloat16, kDtypes };

// W <- argmin_V 1/2 |V - W|^2 + reg_lambda * Reg_{n:m}(V), in place.
struct ProxCall {
  void* weight;                // [numel] of `dtype`, in rows of in_features; fastest at a multiple of 16 bytes
  int64_t numel, in_features;  // multiples of 4 if m is 4; otherwise a row may end in a remainder
  Dtype dtype;
  double reg_lambda;  // > 0
  int m;              // n = m - 2 weights are kept of every m: 4, or 6, 8 or 10 (only on the CPU)
};

// One step of AdamW, then the prox, in place; `adamw_prox` in proxsparse/reference has the equations.
struct AdamWProxCall {
  void* weight;                // [numel] of `dtype`, in rows of in_features
  void *exp_avg, *exp_avg_sq;  // [numel] of A, or of bfloat16 if moments_bfloat16
  void* master;                // [numel] of A; null: the weight is updated without a master copy
  const void* grad;            // [numel] of `dtype`
  const void* scale;           // c, [in_features] of A; null means 1
  int64_t numel, in_features;  // as in ProxCall if reg_lambda > 0
  Dtype dtype;
  bool moments_bfloat16;
  double lr, beta1, beta2, eps;
  double decay;        // 1 - lr * weight_decay
  double correction1;  // 1 / (1 - beta1^step), step counted from 1
  double correction2;  // 1 / sqrt(1 - beta2^step)
  double reg_lambda;   // 0: AdamW without the prox
  int m;               // as in ProxCall
  bool stochastic;     // rounding to bfloat16, with the random bits of `seed`
  uint64_t seed;
};

// out <- W0 where c * w * sign(W0) is among the m - 2 largest of its block, else 0.
struct MaskedWeightCall {
  void* out;                   // [numel], stored as `pretrained`, in rows of in_features
  const void* weight;          // w, [numel] of `dtype`
  const void* pretrained;      // W0, [numel] of `dtype`, or of bfloat16 if pretrained_bfloat16
  const void* scale;           // c, [in_features] of A; null means 1
  int64_t numel, in_features;  // as in ProxCall
  Dtype dtype;
  bool pretrained_bfloat16;  // for a float32 weight only
  int m;                     // as in ProxCall
};

// A 2:4 weight and its packed format (proxsparse/reference describes it), in either direction.
struct PackCall {
  void* weight;      // [rows, in_features]
  void* values;      // [rows, in_features / 2]
  uint8_t* indices;  // [rows, ceil(in_features / 8)]
  int64_t rows, in_features;
};

}  // namespace proxsparse
