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

// mask <- true on the n largest scores of every 4; ties go to the lower index, a NaN counts as the largest.
//   score  [..., in_features], CPU, contiguous; float32, float64, bfloat16 or float16
//   n      1 or 2
//   mask   bool, shape of score, contiguous; overwritten
void mask_n4(const at::Tensor& score, int64_t n, const at::Tensor& mask);

// The instruction set the kernels run with: "default", "avx2" or "avx512"; the widest of this CPU, at most the one that
// the environment's PROXSPARSE_CPU_CAPABILITY names.
std::string cpu_capability();

}  // namespace proxsparse
