// The dtypes of tensors that kernels serve.
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels.h"

namespace proxsparse {

// Raises ValueError, naming the tensor, for a dtype that no kernel serves.
inline Dtype dtype_of(const at::Tensor& tensor, const char* what) {
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
      TORCH_CHECK_VALUE(false, what, " has dtype ", tensor.scalar_type(),
                        ": convert it to float32, float64, bfloat16 or float16");
  }
}

}  // namespace proxsparse
