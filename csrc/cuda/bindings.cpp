// proxsparse._C_cuda: the CUDA kernels for proxsparse/ops/backends/cuda.py. Python passes the stream as a number, so
// that no header of a CUDA build of torch is needed. The device of the tensors must be the current one.
#include <torch/csrc/utils/pybind.h>

#include <limits>

#include "../checks.h"
#include "launch.h"

namespace proxsparse::gpu {
namespace {

void check(cudaError_t status) { TORCH_CHECK(status == cudaSuccess, "CUDA: ", cudaGetErrorString(status)); }

// prox_nm_ in csrc/ops.h for 2:4, on the GPU; `stream` is a cudaStream_t.
void prox_24_(const at::Tensor& weight, double reg_lambda, int64_t stream) {
  const ProxCall call = checked_prox(at::kCUDA, weight, reg_lambda);
  if (reg_lambda == 0 || call.numel == 0) return;
  check(launch_prox(call, reinterpret_cast<cudaStream_t>(stream)));
}

// adamw_prox_ in csrc/ops.h for 2:4, on the GPU.
void adamw_prox_(const at::Tensor& weight, const at::Tensor& grad, const at::Tensor& exp_avg,
                 const at::Tensor& exp_avg_sq, const OptionalTensor& master, const OptionalTensor& scale, int64_t step,
                 double lr, double beta1, double beta2, double eps, double weight_decay, double reg_lambda,
                 std::optional<int64_t> seed, int64_t stream) {
  const AdamWProxCall call = checked_adamw_prox(at::kCUDA, weight, grad, exp_avg, exp_avg_sq, master, scale, step, lr,
                                                beta1, beta2, eps, weight_decay, reg_lambda, seed);
  if (call.numel == 0) return;
  check(launch_adamw_prox(call, reinterpret_cast<cudaStream_t>(stream)));
}

// masked_weight_nm_ in csrc/ops.h for 2:4, on the GPU.
void masked_weight_24_(const at::Tensor& out, const at::Tensor& weight, const at::Tensor& pretrained,
                       const OptionalTensor& scale, int64_t stream) {
  const MaskedWeightCall call = checked_masked_weight(at::kCUDA, out, weight, pretrained, scale);
  if (call.numel == 0) return;
  check(launch_masked_weight(call, reinterpret_cast<cudaStream_t>(stream)));
}

// ------------------------------------------------------------------------- packed 2:4 weights

int checked_int(int64_t size) {
  TORCH_CHECK_VALUE(size <= std::numeric_limits<int>::max() / 64, "a dimension of ", size, " is too large");
  return static_cast<int>(size);
}

// y [rows, out_features] = x [rows, in_features] W^T + bias for 1 to 16 rows and an (m-2):m weight, all bfloat16 or all
// float16, except that values with scales are codes: int8, or uint8 with two in each.
void gemv(const at::Tensor& x, const at::Tensor& values, const at::Tensor& indices, const OptionalTensor& scales,
          const OptionalTensor& bias, const at::Tensor& y, int64_t m, int64_t stream) {
  check_sparse_linear(at::kCUDA, x, values, indices, scales, bias, y, m);
  check_alignment("x", x, 8);
  const Dtype dtype = dtype_of(x, "x");
  TORCH_CHECK_VALUE(dtype == kBFloat16 || dtype == kFloat16, "x has dtype ", x.scalar_type(),
                    ": gemv supports bfloat16 and float16");
  TORCH_CHECK_VALUE(1 <= x.size(0) && x.size(0) <= 16, "x of shape ", x.sizes(), ": gemv supports 1 to 16 rows");
  const GemvCall call{.x = x.const_data_ptr(),
                      .values = values.const_data_ptr(),
                      .indices = indices.const_data_ptr<uint8_t>(),
                      .bias = data_or_null(bias),
                      .y = y.mutable_data_ptr(),
                      .rows = static_cast<int>(x.size(0)),
                      .out_features = checked_int(values.size(0)),
                      .in_features = checked_int(values.size(1) * (codes_of(values, scales) == kInt4 ? 4 : 2)),
                      .x_features = checked_int(x.size(1)),
                      .m = checked_int(m),
                      .dtype = dtype,
                      .codes = codes_of(values, scales),
                      .scales = data_or_null(scales)};
  if (call.out_features == 0 || call.in_features == 0) return;
  check(launch_gemv(call, reinterpret_cast<cudaStream_t>(stream)));
}

PackCall checked_pack_24(const at::Tensor& weight, const at::Tensor& values, const at::Tensor& indices) {
  const int64_t bytes = weight.element_size();
  TORCH_CHECK_VALUE(bytes == 2 || bytes == 4, "weight has dtype ", weight.scalar_type(),
                    ": this kernel supports numbers of 2 and 4 bytes");
  const PackCall call = checked_pack(at::kCUDA, weight, values, indices);
  check_alignment("weight", weight, 4 * bytes);
  check_alignment("values", values, 2 * bytes);
  checked_int(call.in_features);
  return call;
}

// values and indices <- weight [..., in_features]. infeasible [1], int32, becomes 1 if the weight is not 2:4.
void pack_24(const at::Tensor& weight, const at::Tensor& values, const at::Tensor& indices,
             const at::Tensor& infeasible, int64_t stream) {
  const PackCall call = checked_pack_24(weight, values, indices);
  check_tensor("infeasible", infeasible, at::kCUDA, {1}, at::kInt);
  if (weight.numel() == 0) return;
  const auto bytes = static_cast<int>(weight.element_size());
  check(launch_pack(call, bytes, infeasible.mutable_data_ptr<int>(), reinterpret_cast<cudaStream_t>(stream)));
}

// The inverse.
void unpack_24(const at::Tensor& values, const at::Tensor& indices, const at::Tensor& weight, int64_t stream) {
  const PackCall call = checked_pack_24(weight, values, indices);
  if (weight.numel() == 0) return;
  const auto bytes = static_cast<int>(weight.element_size());
  check(launch_unpack(call, bytes, reinterpret_cast<cudaStream_t>(stream)));
}

// metadata, flat <- indices [out_features, in_features / 8] in the order of CUTLASS's kernels.
void cutlass_metadata_(const at::Tensor& indices, const at::Tensor& metadata, int64_t architecture, int64_t stream) {
  TORCH_CHECK_VALUE(indices.dim() == 2, "indices of shape ", indices.sizes(),
                    " must be [out_features, in_features / 8]");
  const int64_t rows = indices.size(0), bytes = indices.size(1);
  const int64_t padded = (rows + 63) / 64 * 64 * ((bytes + 15) / 16 * 16);
  TORCH_CHECK_VALUE(architecture == 80 ? rows % 32 == 0 && bytes % 8 == 0 : architecture == 90 && bytes % 2 == 0,
                    "architecture ", architecture, " has no metadata for indices of shape ", indices.sizes());
  check_tensor("indices", indices, at::kCUDA, indices.sizes(), at::kByte);
  check_tensor("metadata", metadata, at::kCUDA, {architecture == 80 ? rows * bytes : padded}, at::kByte);
  check_alignment("indices", indices, 16);
  check_alignment("metadata", metadata, 16);
  if (indices.numel() == 0) return;
  const MetadataCall call{.indices = indices.const_data_ptr<uint8_t>(),
                          .metadata = metadata.mutable_data_ptr<uint8_t>(),
                          .out_features = checked_int(rows),
                          .in_features = checked_int(8 * bytes),
                          .architecture = static_cast<int>(architecture)};
  check(launch_metadata(call, reinterpret_cast<cudaStream_t>(stream)));
}

}  // namespace
}  // namespace proxsparse::gpu

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "The CUDA kernels of proxsparse; csrc/cuda/launch.h documents them.";
  const auto without_gil = py::call_guard<py::gil_scoped_release>();
  module.def("prox_24_", &proxsparse::gpu::prox_24_, without_gil);
  module.def("adamw_prox_", &proxsparse::gpu::adamw_prox_, without_gil);
  module.def("masked_weight_24_", &proxsparse::gpu::masked_weight_24_, without_gil);
  module.def("gemv", &proxsparse::gpu::gemv, without_gil);
  module.def("pack_24", &proxsparse::gpu::pack_24, without_gil);
  module.def("unpack_24", &proxsparse::gpu::unpack_24, without_gil);
  module.def("cutlass_metadata_", &proxsparse::gpu::cutlass_metadata_, without_gil);
}
