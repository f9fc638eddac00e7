// proxsparse._C_cuda: the CUDA kernels for proxsparse/ops/backends/cuda.py. The stream comes from Python as a number,
// so that no header of a CUDA build of torch is needed; the device of the tensors must be the current one.
#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <limits>
#include <optional>
#include <utility>

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

// ------------------------------------------------------------------------- packed 2:4 weights

int count(int64_t number) {
  TORCH_CHECK_VALUE(number <= std::numeric_limits<int>::max() / 64, "a dimension of ", number, " is too large");
  return static_cast<int>(number);
}

// [out_features, in_features] of a packed weight; checks both of its tensors.
std::pair<int, int> check_packed(const at::Tensor& values, const at::Tensor& indices) {
  TORCH_CHECK_VALUE(values.dim() == 2 && values.size(1) % 2 == 0, "values of shape ", values.sizes(),
                    " must be [out_features, in_features / 2]");
  check_tensor("values", values, values.sizes(), values.scalar_type());
  check_tensor("indices", indices, {values.size(0), (values.size(1) + 3) / 4}, at::kByte);
  return {count(values.size(0)), count(2 * values.size(1))};
}

// y [rows, out_features] = x [rows, in_features] W^T + bias, of 1 to 16 rows; all bfloat16 or all float16. GemvCall
// documents warps, splits, tiles and dependent.
void gemv(const at::Tensor& x, const at::Tensor& values, const at::Tensor& indices, const OptionalTensor& bias,
          const at::Tensor& y, int warps, int splits, int tiles, bool dependent, int64_t stream) {
  const auto [out_features, in_features] = check_packed(values, indices);
  const at::ScalarType dtype = values.scalar_type();
  const int64_t rows = x.dim() == 2 ? x.size(0) : 0;
  TORCH_CHECK_VALUE(1 <= rows && rows <= 16, "x of shape ", x.sizes(), ": gemv serves 1 to 16 rows");
  TORCH_CHECK_VALUE(dtype == at::kBFloat16 || dtype == at::kHalf, "gemv serves bfloat16 and float16, not ", dtype);
  check_tensor("x", x, {rows, in_features}, dtype);
  check_tensor("y", y, {rows, out_features}, dtype);
  if (bias) check_tensor("bias", *bias, {out_features}, dtype);
  TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 8 == 0, "x must begin at a multiple of 8 bytes");
  if (out_features == 0 || in_features == 0) return;
  const GemvCall call{.x = x.const_data_ptr(),
                      .values = values.const_data_ptr(),
                      .indices = indices.const_data_ptr<uint8_t>(),
                      .bias = data(bias),
                      .y = y.mutable_data_ptr(),
                      .rows = static_cast<int>(rows),
                      .out_features = out_features,
                      .in_features = in_features,
                      .type = type_of(values),
                      .warps = warps,
                      .splits = splits,
                      .tiles = tiles,
                      .dependent = dependent};
  check(launch_gemv(call, reinterpret_cast<cudaStream_t>(stream)));
}

// Between weight [out_features, in_features] and its packed form: packs if there is a place for `infeasible`, int32
// [1].
void pack_24(const at::Tensor& weight, const at::Tensor& values, const at::Tensor& indices,
             const OptionalTensor& infeasible, int64_t stream) {
  const auto [out_features, in_features] = check_packed(values, indices);
  const auto size = static_cast<int>(weight.element_size());
  check_tensor("weight", weight, {out_features, in_features}, values.scalar_type());
  TORCH_CHECK_VALUE(size == 2 || size == 4, "pack_24 serves numbers of 2 and 4 bytes, not ", weight.scalar_type());
  if (infeasible) check_tensor("infeasible", *infeasible, {1}, at::kInt);
  for (const at::Tensor& tensor : {weight, values}) {
    const int64_t block = tensor.is_same(weight) ? 4 * size : 2 * size;
    TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % block == 0, "a tensor of shape ",
                      tensor.sizes(), " must begin at a multiple of ", block, " bytes");
  }
  if (weight.numel() == 0) return;
  const PackCall call{.weight = weight.mutable_data_ptr(),
                      .values = values.mutable_data_ptr(),
                      .indices = indices.mutable_data_ptr<uint8_t>(),
                      .infeasible = infeasible ? infeasible->mutable_data_ptr<int>() : nullptr,
                      .rows = out_features,
                      .in_features = in_features,
                      .bytes_of_weight = size};
  check(launch_pack(call, reinterpret_cast<cudaStream_t>(stream)));
}

// indices [out_features, in_features / 8] in the order of CUTLASS's kernels, flat.
void cutlass_metadata_(const at::Tensor& indices, const at::Tensor& metadata, int64_t architecture, int64_t stream) {
  TORCH_CHECK_VALUE(indices.dim() == 2, "indices of shape ", indices.sizes(),
                    " must be [out_features, in_features / 8]");
  const int64_t rows = indices.size(0), bytes = indices.size(1);
  const int64_t padded = (rows + 63) / 64 * 64 * ((bytes + 15) / 16 * 16);
  TORCH_CHECK_VALUE(architecture == 80 ? rows % 32 == 0 && bytes % 8 == 0 : architecture == 90 && bytes % 2 == 0,
                    "architecture ", architecture, " has no metadata for indices of shape ", indices.sizes());
  check_tensor("indices", indices, indices.sizes(), at::kByte);
  check_tensor("metadata", metadata, {architecture == 80 ? rows * bytes : padded}, at::kByte);
  for (const at::Tensor& tensor : {indices, metadata}) {
    TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0,
                      "indices and metadata must begin at a multiple of 16 bytes");
  }
  if (indices.numel() == 0) return;
  const MetadataCall call{.indices = indices.const_data_ptr<uint8_t>(),
                          .metadata = metadata.mutable_data_ptr<uint8_t>(),
                          .out_features = count(rows),
                          .in_features = count(8 * bytes),
                          .architecture = static_cast<int>(architecture)};
  check(launch_metadata(call, reinterpret_cast<cudaStream_t>(stream)));
}

}  // namespace
}  // namespace proxsparse::gpu

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "The CUDA kernels of proxsparse; csrc/cuda/launch.h documents them.";
  const auto without_gil = py::call_guard<py::gil_scoped_release>();
  module.def("prox_n4_", &proxsparse::gpu::prox_n4_, without_gil);
  module.def("adamw_prox_", &proxsparse::gpu::adamw_prox_, without_gil);
  module.def("gemv", &proxsparse::gpu::gemv, without_gil);
  module.def("pack_24", &proxsparse::gpu::pack_24, without_gil);
  module.def("cutlass_metadata_", &proxsparse::gpu::cutlass_metadata_, without_gil);
}
