// The contract of the compiled kernels: proxsparse/ops/backends/cpp.py calls them through bindings.cpp.
// Every function checks its arguments and raises with the value and the remedy; empty tensors are fine.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

namespace proxsparse {

// W <- argmin_V 1/2 |V - c W|^2 + reg_lambda * Reg_{n:4}(V), divided back by c, in place.
//   weight      [..., in_features], CPU, contiguous; float32, float64, bfloat16 or float16
//   reg_lambda  finite, >= 0, in units of 1 / |c w|^(n-1)
//   n           weights kept of every 4: 1 or 2
//   scale       c, [in_features], positive, contiguous; float64 for a float64 weight, float32 otherwise; none means 1
void prox_n4_(const at::Tensor& weight, double reg_lambda, int64_t n, const std::optional<at::Tensor>& scale);

// One step of AdamW, then the prox, in one pass: proxsparse/reference/, adamw_prox, has the equations.
//   weight               as above, but of any shape if reg_lambda is 0; all tensors are contiguous CPU tensors
//   grad                 as weight; not changed
//   exp_avg, exp_avg_sq  shape of weight; float64 for a float64 weight, float32 or bfloat16 otherwise
//   master               float32, for a bfloat16 or float16 weight, or none
//   pretrained           as weight; none if frozen_lambda is 0
//   scale                as above
//   step                 counted from 1
//   seed                 of the stochastic rounding to bfloat16, all 64 bits of it; none rounds to nearest
void adamw_prox_(const at::Tensor& weight, const at::Tensor& grad, const at::Tensor& exp_avg,
                 const at::Tensor& exp_avg_sq, const std::optional<at::Tensor>& master,
                 const std::optional<at::Tensor>& pretrained, const std::optional<at::Tensor>& scale, int64_t step,
                 double lr, double beta1, double beta2, double eps, double weight_decay, double reg_lambda, int64_t n,
                 double frozen_lambda, double frozen_eps, std::optional<int64_t> seed);

// mask <- true on the n largest scores of every 4; ties go to the lower index, a NaN counts as the largest.
//   score  [..., in_features], CPU, contiguous; float32, float64, bfloat16 or float16
//   n      1 or 2
//   mask   bool, shape of score, contiguous; overwritten
void mask_n4(const at::Tensor& score, int64_t n, const at::Tensor& mask);

// weight to kept values and their places; proxsparse/reference/pack.py describes the form and the rule. False if a block has
// more than n nonzeros: what was written is then worthless.
//   weight   [..., in_features], CPU, contiguous; float32, float64, bfloat16 or float16
//   n        1, 2 or 3
//   values   [..., k], k = in_features * n / 4, as weight; overwritten
//   indices  uint8, [..., ceil(k / 4)], contiguous; overwritten
bool pack_n4(const at::Tensor& weight, int64_t n, const at::Tensor& values, const at::Tensor& indices);

// The inverse: weight, as above, is overwritten. Places out of order give wrong weights, nothing worse.
void unpack_n4(const at::Tensor& values, const at::Tensor& indices, int64_t n, const at::Tensor& weight);

// y <- x W^T + bias with a packed 2:4 W [out_features, in_features], accumulated in float32. A number of x has no
// influence where its weight was not kept, be it infinite or NaN. A CPU that multiplies pairs of bfloat16 takes
// subnormal numbers for zero.
//   x        [rows, in_features], CPU, contiguous, as all that follow; float32 or bfloat16
//   values   [out_features, in_features / 2], as x
//   indices  uint8, [out_features, ceil(in_features / 8)]
//   bias     [out_features], as x, or none
//   y        [rows, out_features], as x; overwritten
void packed_linear(const at::Tensor& x, const at::Tensor& values, const at::Tensor& indices,
                   const std::optional<at::Tensor>& bias, const at::Tensor& y);

// The instruction set the kernels run with: "default", "avx2", "avx512" or "avx512_bf16"; the widest of this CPU, at
// most the one that the environment's PROXSPARSE_CPU_CAPABILITY names.
std::string cpu_capability();

}  // namespace proxsparse
