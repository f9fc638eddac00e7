// The functions of proxsparse._C, which proxsparse/ops/backends/cpp.py calls through bindings.cpp. Every function
// checks its arguments and raises ValueError with the value and the remedy. All tensors are contiguous CPU tensors, and
// may be empty.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

#include "checks.h"

namespace proxsparse {

// W <- argmin_V 1/2 |V - W|^2 + reg_lambda * Reg_{n:m}(V), in place.
//   weight      [..., in_features]; float32, float64, bfloat16 or float16
//   reg_lambda  finite, >= 0, in units of 1 / |w|^(m-3)
//   m           4, 6, 8 or 10; n = m - 2 are kept; the in_features % m last weights of a row do not change (m > 4)
void prox_nm_(const at::Tensor& weight, double reg_lambda, int64_t m);

// One step of AdamW, then the prox, in one pass; `adamw_prox` in proxsparse/reference has the equations.
//   weight               as above, but of any shape if reg_lambda is 0
//   grad                 as weight; not changed
//   exp_avg, exp_avg_sq  shape of weight; float64 for a float64 weight, float32 or bfloat16 otherwise
//   master               float32, for a bfloat16 or float16 weight, or none
//   scale                c, [in_features], positive; float64 for a float64 weight, float32 otherwise; none means 1
//   step                 counted from 1
//   seed                 of stochastic rounding to bfloat16, 64 bits; none means rounding to nearest
void adamw_prox_(const at::Tensor& weight, const at::Tensor& grad, const at::Tensor& exp_avg,
                 const at::Tensor& exp_avg_sq, const OptionalTensor& master, const OptionalTensor& scale, int64_t step,
                 double lr, double beta1, double beta2, double eps, double weight_decay, double reg_lambda, int64_t m,
                 std::optional<int64_t> seed);

// mask <- true for the m - 2 largest scores of every m. Of equal scores, the one with the lower index is kept; a NaN is
// treated as infinity.
//   score  [..., in_features]; float32, float64, bfloat16 or float16
//   m      as above; the remainder of a row is kept
//   mask   bool, shape of score; overwritten
void mask_nm(const at::Tensor& score, int64_t m, const at::Tensor& mask);

// out <- W0 where the score c * w * sign(W0) is among the m - 2 largest of its block, as in mask_nm; else +0.
//   out         as pretrained; overwritten
//   weight      [..., in_features]; float32, float64, bfloat16 or float16
//   pretrained  W0, as weight, or bfloat16 for a float32 weight
//   scale       c, [in_features]; float64 for a float64 weight, float32 otherwise; none means 1
//   m           as in mask_nm
void masked_weight_nm_(const at::Tensor& out, const at::Tensor& weight, const at::Tensor& pretrained,
                       const OptionalTensor& scale, int64_t m);

// A 2:4 weight -> kept values and their places; proxsparse/reference/pack.py describes the packed format. Returns false
// if a block has more than two nonzeros; values and indices are then invalid.
//   weight   [..., in_features]; float32, float64, bfloat16 or float16
//   values   [..., in_features / 2], dtype of weight; overwritten
//   indices  uint8, [..., ceil(in_features / 8)]; overwritten
bool pack_24(const at::Tensor& weight, const at::Tensor& values, const at::Tensor& indices);

// The inverse: overwrites weight. Places that are not in ascending order give wrong weights, but no invalid access.
void unpack_24(const at::Tensor& values, const at::Tensor& indices, const at::Tensor& weight);

// The values of a packed weight -> codes of 8 or 4 bits and scales; proxsparse/reference/quantize.py has the equations.
//   values  [..., k]; float32, float64, bfloat16 or float16
//   codes   int8, [..., k], for 8 bits; uint8, [..., k / 2], for 4 bits; overwritten
//   scales  dtype of values, [..., 1] for 8 bits, [..., ceil(k / 32)] for 4 bits; overwritten
void quantize_nm(const at::Tensor& values, const at::Tensor& codes, const at::Tensor& scales);

// The inverse, code * scale rounded to the dtype of the scales: overwrites values.
void dequantize_nm(const at::Tensor& codes, const at::Tensor& scales, const at::Tensor& values);

// y <- x W^T + bias with a W [out_features, in_features] that is packed for blocks of m columns, accumulated in
// float32. For few rows, numbers of x at weights that are not kept have no effect, even if they are infinite or NaN;
// many rows are multiplied by the unpacked weight. A CPU that multiplies pairs of bfloat16 treats subnormal numbers as
// zero.
//   x        [rows, in_features]; float32 or bfloat16
//   values   c = expanded_features(in_features, m): [out_features, c / 2], dtype of x or int8 codes; or uint8,
//            [out_features, c / 4], with two codes of 4 bits in each, see proxsparse/reference/quantize.py
//   indices  uint8, [out_features, ceil(c / 8)]
//   scales   of codes, dtype of x: [out_features, 1] of int8, [out_features, ceil(c / 64)] of 4 bits; or none
//   bias     [out_features], dtype of x, or none
//   y        [rows, out_features], dtype of x; overwritten
void sparse_linear(const at::Tensor& x, const at::Tensor& values, const at::Tensor& indices,
                   const OptionalTensor& scales, const OptionalTensor& bias, const at::Tensor& y, int64_t m);

// y of the same product for x [..., in_features], without the dispatcher of torch, which takes longer than the product
// of a small layer. None if the call needs the dispatcher (autograd, autocast, a mode), if a tensor is not on the CPU
// or not contiguous, or if x does not fit the weight.
OptionalTensor sparse_linear_direct(const at::Tensor& x, const at::Tensor& values, const at::Tensor& indices,
                                    const OptionalTensor& scales, const OptionalTensor& bias, int64_t m);

// The instruction set of the kernels: "default", "avx2", "avx512", "avx512_bf16" or "amx". The widest of this CPU, at
// most the one named by the environment variable PROXSPARSE_CPU_CAPABILITY.
std::string cpu_capability();

}  // namespace proxsparse
