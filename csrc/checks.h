// Checks the arguments that Python passes, on the CPU and on the GPU, and makes the calls (calls.h) from them. Every
// check raises ValueError with the value and the remedy.
#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>
#include <optional>

#include "calls.h"
#include "codes.h"

namespace proxsparse {

using OptionalTensor = std::optional<at::Tensor>;

inline const void* data_or_null(const OptionalTensor& tensor) { return tensor ? tensor->const_data_ptr() : nullptr; }

inline Dtype dtype_of(const at::Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return kFloat32;
    case at::kDouble:
      return kFloat64;
    case at::kBFloat16:
      return kBFloat16;
    case at::kHalf:
      return kFloat16;
    default:
      TORCH_CHECK_VALUE(false, name, " has dtype ", tensor.scalar_type(),
                        ": convert it to float32, float64, bfloat16 or float16");
  }
}

// The dtype of the arithmetic.
inline at::ScalarType arithmetic_of(const at::Tensor& weight) {
  return weight.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

inline int64_t in_features_of(const at::Tensor& weight) { return weight.dim() == 0 ? 1 : weight.size(-1); }

inline void check_tensor(const char* name, const at::Tensor& tensor, at::DeviceType device, at::IntArrayRef sizes,
                         at::ScalarType dtype) {
  TORCH_CHECK_VALUE(tensor.device().type() == device && tensor.is_contiguous() && tensor.sizes() == sizes &&
                        tensor.scalar_type() == dtype,
                    name, " of shape ", tensor.sizes(), " and dtype ", tensor.scalar_type(), " on ", tensor.device(),
                    ": it must be a contiguous ", dtype, " tensor of shape ", sizes, " on ", at::Device(device));
}

inline void check_alignment(const char* name, const at::Tensor& tensor, int64_t bytes) {
  TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % bytes == 0, name, " of shape ",
                    tensor.sizes(), ": its address must be a multiple of ", bytes, " bytes");
}

inline void check_in_features(const char* name, const at::Tensor& weight) {
  TORCH_CHECK_VALUE(weight.dim() > 0 && weight.size(-1) % 4 == 0, name, " of shape ", weight.sizes(),
                    ": in_features must be a multiple of 4; exclude this layer");
}

// Raises for a pattern that the kernels do not support, or a weight that it does not divide. CUDA supports only m = 4.
inline void check_pattern(const char* name, const at::Tensor& weight, int64_t m) {
  if (m == 4) {
    check_in_features(name, weight);
  } else {
    TORCH_CHECK_VALUE(m == 6 || m == 8 || m == 10, "m=", m,
                      ": this kernel supports 2:4, 4:6, 6:8 and 8:10; choose another backend");
    TORCH_CHECK_VALUE(weight.dim() > 0 && weight.size(-1) % 2 == 0, name, " of shape ", weight.sizes(),
                      ": in_features must be even; exclude this layer");
  }
}

inline void check_reg_lambda(double reg_lambda) {
  TORCH_CHECK_VALUE(reg_lambda >= 0 && std::isfinite(reg_lambda), "reg_lambda=", reg_lambda,
                    " must be a finite number >= 0");
}

// The arguments of prox_nm_ (ops.h).
inline ProxCall checked_prox(at::DeviceType device, const at::Tensor& weight, double reg_lambda, int64_t m = 4) {
  check_tensor("weight", weight, device, weight.sizes(), weight.scalar_type());
  check_pattern("weight", weight, m);
  check_reg_lambda(reg_lambda);
  return {.weight = weight.mutable_data_ptr(),
          .numel = weight.numel(),
          .in_features = in_features_of(weight),
          .dtype = dtype_of(weight, "weight"),
          .reg_lambda = reg_lambda,
          .m = static_cast<int>(m)};
}

// The arguments of adamw_prox_ (ops.h).
inline AdamWProxCall checked_adamw_prox(at::DeviceType device, const at::Tensor& weight, const at::Tensor& grad,
                                        const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq,
                                        const OptionalTensor& master, const OptionalTensor& scale, int64_t step,
                                        double lr, double beta1, double beta2, double eps, double weight_decay,
                                        double reg_lambda, std::optional<int64_t> seed, int64_t m = 4) {
  const Dtype kind = dtype_of(weight, "weight");
  const at::ScalarType dtype = weight.scalar_type(), arithmetic = arithmetic_of(weight);
  const bool moments_bfloat16 = exp_avg.scalar_type() == at::kBFloat16 && kind != kFloat64;
  const auto check = [&](const char* name, const at::Tensor& tensor, at::ScalarType expected) {
    check_tensor(name, tensor, device, weight.sizes(), expected);
  };
  check("weight", weight, dtype);
  check("grad", grad, dtype);
  check("exp_avg", exp_avg, moments_bfloat16 ? at::kBFloat16 : arithmetic);
  check("exp_avg_sq", exp_avg_sq, exp_avg.scalar_type());
  TORCH_CHECK_VALUE(!master || kind == kBFloat16 || kind == kFloat16, "master: a ", dtype,
                    " weight needs no master copy; pass none");
  if (master) check("master", *master, at::kFloat);
  if (scale) check_tensor("scale", *scale, device, {in_features_of(weight)}, arithmetic);
  TORCH_CHECK_VALUE(step >= 1, "step=", step, ": steps are counted from 1");
  check_reg_lambda(reg_lambda);
  if (reg_lambda > 0) check_pattern("weight", weight, m);
  return {.weight = weight.mutable_data_ptr(),
          .exp_avg = exp_avg.mutable_data_ptr(),
          .exp_avg_sq = exp_avg_sq.mutable_data_ptr(),
          .master = master ? master->mutable_data_ptr() : nullptr,
          .grad = grad.const_data_ptr(),
          .scale = data_or_null(scale),
          .numel = weight.numel(),
          .in_features = in_features_of(weight),
          .dtype = kind,
          .moments_bfloat16 = moments_bfloat16,
          .lr = lr,
          .beta1 = beta1,
          .beta2 = beta2,
          .eps = eps,
          .decay = 1 - lr * weight_decay,
          .correction1 = 1 / (1 - std::pow(beta1, step)),
          .correction2 = 1 / std::sqrt(1 - std::pow(beta2, step)),
          .reg_lambda = reg_lambda,
          .m = static_cast<int>(m),
          .stochastic = seed.has_value(),
          .seed = static_cast<uint64_t>(seed.value_or(0))};
}

// The arguments of masked_weight_nm_ (ops.h).
inline MaskedWeightCall checked_masked_weight(at::DeviceType device, const at::Tensor& out, const at::Tensor& weight,
                                              const at::Tensor& pretrained, const OptionalTensor& scale,
                                              int64_t m = 4) {
  const at::ScalarType dtype = weight.scalar_type();
  const bool mixed = dtype == at::kFloat && pretrained.scalar_type() == at::kBFloat16;
  check_tensor("weight", weight, device, weight.sizes(), dtype);
  check_pattern("weight", weight, m);
  check_tensor("pretrained", pretrained, device, weight.sizes(), mixed ? at::kBFloat16 : dtype);
  check_tensor("out", out, device, weight.sizes(), pretrained.scalar_type());
  if (scale) check_tensor("scale", *scale, device, {in_features_of(weight)}, arithmetic_of(weight));
  return {.out = out.mutable_data_ptr(),
          .weight = weight.const_data_ptr(),
          .pretrained = pretrained.const_data_ptr(),
          .scale = data_or_null(scale),
          .numel = weight.numel(),
          .in_features = in_features_of(weight),
          .dtype = dtype_of(weight, "weight"),
          .pretrained_bfloat16 = mixed,
          .m = static_cast<int>(m)};
}

// A 2:4 weight and its packed format.
inline PackCall checked_pack(at::DeviceType device, const at::Tensor& weight, const at::Tensor& values,
                             const at::Tensor& indices) {
  check_in_features("weight", weight);
  check_tensor("weight", weight, device, weight.sizes(), weight.scalar_type());
  auto sizes = weight.sizes().vec();
  const int64_t in_features = sizes.back();
  sizes.back() = in_features / 2;
  check_tensor("values", values, device, sizes, weight.scalar_type());
  sizes.back() = (sizes.back() + 3) / 4;
  check_tensor("indices", indices, device, sizes, at::kByte);
  return {.weight = weight.mutable_data_ptr(),
          .values = values.mutable_data_ptr(),
          .indices = indices.mutable_data_ptr<uint8_t>(),
          .rows = in_features == 0 ? 0 : weight.numel() / in_features,
          .in_features = in_features};
}

// How values with these scales are stored.
inline Codes codes_of(const at::Tensor& values, const OptionalTensor& scales) {
  if (!scales) return kPlain;
  return values.scalar_type() == at::kChar ? kInt8 : kInt4;
}

// A packed 2:4 weight [out_features, in_features] and a bias for products with an x of this dtype. The bias and the
// scales have the same dtype; so have the values, unless they are codes with scales: int8, or uint8 with two in each.
inline void check_packed_weight(at::DeviceType device, at::ScalarType dtype, int64_t in_features,
                                const at::Tensor& values, const at::Tensor& indices, const OptionalTensor& scales,
                                const OptionalTensor& bias) {
  TORCH_CHECK_VALUE(values.dim() == 2, "values of shape ", values.sizes(), ": they must have two dimensions");
  const int64_t out_features = values.size(0);
  if (!scales) {
    check_tensor("values", values, device, {out_features, in_features / 2}, dtype);
  } else if (values.scalar_type() == at::kChar) {
    check_tensor("values", values, device, {out_features, in_features / 2}, at::kChar);
    check_tensor("scales", *scales, device, {out_features, 1}, dtype);
  } else {
    const int64_t groups = (in_features + kScaleColumns - 1) / kScaleColumns;
    check_tensor("values", values, device, {out_features, in_features / 4}, at::kByte);
    check_tensor("scales", *scales, device, {out_features, groups}, dtype);
  }
  check_tensor("indices", indices, device, {out_features, (in_features + 7) / 8}, at::kByte);
  if (bias) check_tensor("bias", *bias, device, {out_features}, dtype);
}

// The number of columns of a packed (m-2):m weight, those of its windows with their padding
// (proxsparse/reference/windows.py). in_features and m are even.
inline int64_t expanded_features(int64_t in_features, int64_t m) {
  const int64_t width = in_features / m * (2 * m - 4) + in_features % m * 2;
  if (m == 4 && in_features % 4 == 0) return width;
  int64_t step = 64;
  while (step > 4 && 32 * ((step - width % step) % step) > width) step /= 2;
  return (width + step - 1) / step * step;
}

// y [rows, out_features] = x [rows, in_features] W^T + bias with a packed (m-2):m W; x and y have one dtype.
inline void check_sparse_linear(at::DeviceType device, const at::Tensor& x, const at::Tensor& values,
                                const at::Tensor& indices, const OptionalTensor& scales, const OptionalTensor& bias,
                                const at::Tensor& y, int64_t m) {
  TORCH_CHECK_VALUE(x.dim() == 2, "x of shape ", x.sizes(), ": it must have two dimensions");
  TORCH_CHECK_VALUE(m >= 4 && m % 2 == 0 && x.size(1) % 2 == 0, "m=", m, ", x of shape ", x.sizes(),
                    ": m must be 4, 6, 8, ..., and the number of columns even");
  check_tensor("x", x, device, x.sizes(), x.scalar_type());
  check_packed_weight(device, x.scalar_type(), expanded_features(x.size(1), m), values, indices, scales, bias);
  check_tensor("y", y, device, {x.size(0), values.size(0)}, x.scalar_type());
}

}  // namespace proxsparse
