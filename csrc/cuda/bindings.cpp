// proxsparse._C_cuda: the CUDA kernels for proxsparse/ops/backends/cuda.py. The stream comes from Python as a number,
// so that no header of a CUDA build of torch is needed; the device of the tensors must be the current one.
#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <limits>
#include <optional>

#include "launch.h"

namespace proxsparse::gpu {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

void check(cudaError_t status) { TORCH_CHECK(status == cudaSuccess, "CUDA: ", cudaGetErrorString(status)); }

Type type_of(const at::Tensor& weight) {
  switch (weight.scalar_type()) {
    case at::kFloat:
      return Type::kFloat32;
    case at::kDouble:
      return Type::kFloat64;
    case at::kBFloat16:
      return Type::kBFloat16;
    case at::kHalf:
      return Type::kFloat16;
    default:
      TORCH_CHECK_VALUE(false, "weight has dtype ", weight.scalar_type(),
                        ": convert it to float32, float64, bfloat16 or float16");
  }
}

at::ScalarType arithmetic_of(const at::Tensor& weight) {
  return weight.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

int64_t in_features(const at::Tensor& weight) { return weight.dim() == 0 ? 1 : weight.size(-1); }

void check_tensor(const char* name, const at::Tensor& tensor, at::IntArrayRef sizes, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(
      tensor.is_cuda() && tensor.is_contiguous() && tensor.sizes() == sizes && tensor.scalar_type() == dtype, name,
      " is ", tensor.scalar_type(), " ", tensor.sizes(), " on ", tensor.device(),
      ": it must be a contiguous CUDA tensor, ", dtype, " ", sizes);
}

const void* data(const OptionalTensor& tensor) { return tensor ? tensor->const_data_ptr() : nullptr; }

void check_blocks(const at::Tensor& weight, double reg_lambda, int64_t n) {
  TORCH_CHECK_VALUE(in_features(weight) % 4 == 0, "weight of shape ", weight.sizes(),
                    ": in_features must be a multiple of 4; exclude this layer");
  TORCH_CHECK_VALUE(n == 1 || n == 2, "n=", n, ": this kernel serves 1:4 and 2:4; choose another backend");
  TORCH_CHECK_VALUE(reg_lambda >= 0 && reg_lambda <= std::numeric_limits<double>::max(), "reg_lambda=", reg_lambda,
                    " must be a finite number >= 0");
}

// As prox_n4_ of csrc/ops.h; `stream` is a cudaStream_t.
void prox_n4_(const at::Tensor& weight, double reg_lambda, int64_t n, const OptionalTensor& scale, int64_t stream) {
  check_tensor("weight", weight, weight.sizes(), weight.scalar_type());
  check_blocks(weight, reg_lambda, n);
  if (scale) check_tensor("scale", *scale, {in_features(weight)}, arithmetic_of(weight));
  if (reg_lambda == 0 || weight.numel() == 0) return;
  const ProxCall call{.weight = weight.mutable_data_ptr(),
                      .size = weight.numel(),
                      .in_features = in_features(weight),
                      .scale = data(scale),
                      .type = type_of(weight),
                      .reg_lambda = reg_lambda,
                      .n = static_cast<int>(n)};
  check(launch_prox(call, reinterpret_cast<cudaStream_t>(stream)));
}

// As adamw_prox_ of csrc/ops.h.
void adamw_prox_(const at::Tensor& weight, const at::Tensor& grad, const at::Tensor& exp_avg,
                 const at::Tensor& exp_avg_sq, const OptionalTensor& master, const OptionalTensor& pretrained,
                 const OptionalTensor& scale, int64_t step, double lr, double beta1, double beta2, double eps,
                 double weight_decay, double reg_lambda, int64_t n, double frozen_lambda, double frozen_eps,
                 std::optional<int64_t> seed, int64_t stream) {
  const at::IntArrayRef sizes = weight.sizes();
  const at::ScalarType dtype = weight.scalar_type(), arithmetic = arithmetic_of(weight);
  const at::ScalarType moments = exp_avg.scalar_type() == at::kBFloat16 ? at::kBFloat16 : arithmetic;
  check_tensor("weight", weight, sizes, dtype);
  check_tensor("grad", grad, sizes, dtype);
  check_tensor("exp_avg", exp_avg, sizes, moments);
  check_tensor("exp_avg_sq", exp_avg_sq, sizes, moments);
  if (master) check_tensor("master", *master, sizes, arithmetic);
  if (frozen_lambda > 0) {
    TORCH_CHECK_VALUE(pretrained, "frozen_lambda=", frozen_lambda, " needs the pretrained weights");
    check_tensor("pretrained", *pretrained, sizes, dtype);
  }
  if (scale) check_tensor("scale", *scale, {in_features(weight)}, arithmetic);
  if (reg_lambda > 0) check_blocks(weight, reg_lambda, n);
  if (weight.numel() == 0) return;
  const AdamWProxCall call{.weight = weight.mutable_data_ptr(),
                           .exp_avg = exp_avg.mutable_data_ptr(),
                           .exp_avg_sq = exp_avg_sq.mutable_data_ptr(),
                           .master = master ? master->mutable_data_ptr() : nullptr,
                           .grad = grad.const_data_ptr(),
                           .pretrained = data(pretrained),
                           .scale = data(scale),
                           .size = weight.numel(),
                           .in_features = in_features(weight),
                           .type = type_of(weight),
                           .moments_bfloat16 = moments == at::kBFloat16,
                           .step = step,
                           .lr = lr,
                           .beta1 = beta1,
                           .beta2 = beta2,
                           .eps = eps,
                           .weight_decay = weight_decay,
                           .reg_lambda = reg_lambda,
                           .n = static_cast<int>(n),
                           .frozen_lambda = frozen_lambda,
                           .frozen_eps = frozen_eps,
                           .stochastic = seed.has_value(),
                           .seed = static_cast<uint64_t>(seed.value_or(0))};
  check(launch_adamw_prox(call, reinterpret_cast<cudaStream_t>(stream)));
}

}  // namespace
}  // namespace proxsparse::gpu

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "The CUDA kernels of proxsparse; csrc/cuda/launch.h documents them.";
  const auto without_gil = py::call_guard<py::gil_scoped_release>();
  module.def("prox_n4_", &proxsparse::gpu::prox_n4_, without_gil);
  module.def("adamw_prox_", &proxsparse::gpu::adamw_prox_, without_gil);
}
