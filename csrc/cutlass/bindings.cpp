// proxsparse._C_cutlass: CUTLASS's sparse matrix multiplications, for proxsparse/ops/backends/cutlass.py. As in
// csrc/cuda/bindings.cpp, the stream is a number, and the device of the tensors must be the current one.
#include <torch/csrc/utils/pybind.h>

#include <string>

#include "../checks.h"
#include "gemm.h"

namespace proxsparse::gemm {
namespace {

template <typename Call = gemm::Call>
const TileOf<Call>& tile_named(int64_t architecture, const std::string& name) {
  for (const TileOf<Call>& tile : tiles<Call>()) {
    if (tile.architecture == architecture && tile.name == name) return tile;
  }
  TORCH_CHECK_VALUE(false, "tile ", name, " for sm_", architecture, " was not built; install proxsparse again");
}

const void* checked(const char* name, const at::Tensor& tensor, at::IntArrayRef sizes, at::ScalarType dtype) {
  check_tensor(name, tensor, at::kCUDA, sizes, dtype);
  check_alignment(name, tensor, 16);
  return tensor.const_data_ptr();
}

int64_t metadata_bytes(int64_t architecture, int64_t out_features, int64_t in_features) {
  if (architecture == 80) return out_features * in_features / 8;
  return (out_features + 63) / 64 * 64 * ((in_features + 127) / 128 * 16);
}

Call call_of(const at::Tensor& values, const at::Tensor& x) {
  TORCH_CHECK_VALUE(values.dim() == 2 && x.dim() == 2, "values of shape ", values.sizes(), " and x of shape ",
                    x.sizes(), " must have two dimensions");
  const int64_t out_features = values.size(0), rows = x.size(0), in_features = 2 * values.size(1);
  Call call{};
  call.values = checked("values", values, {out_features, in_features / 2}, at::kBFloat16);
  call.x = checked("x", x, {rows, in_features}, at::kBFloat16);
  call.out_features = static_cast<int>(out_features);
  call.rows = static_cast<int>(rows);
  call.in_features = static_cast<int>(in_features);
  return call;
}

int64_t workspace_bytes(int64_t architecture, const std::string& tile, const at::Tensor& values, const at::Tensor& x) {
  return static_cast<int64_t>(tile_named(architecture, tile).workspace_bytes(call_of(values, x)));
}

// y = x W^T + bias; transposed and without a bias for architecture 80.
void gemm(int64_t architecture, const std::string& tile, const at::Tensor& values, const at::Tensor& metadata,
          const at::Tensor& x, const OptionalTensor& bias, const at::Tensor& y, const at::Tensor& workspace,
          int64_t stream) {
  const int64_t out_features = values.size(0), rows = x.size(0), columns = x.size(1);
  const bool transposed = architecture == 80;
  TORCH_CHECK_VALUE(!(transposed && bias), "bias: the tiles for sm_80 do not support it; pass none");
  Call call = call_of(values, x);
  call.metadata = checked("metadata", metadata, {metadata_bytes(architecture, out_features, columns)}, at::kByte);
  if (bias) call.bias = checked("bias", *bias, {out_features}, at::kBFloat16);
  checked("y", y, {transposed ? out_features : rows, transposed ? rows : out_features}, at::kBFloat16);
  call.y = y.mutable_data_ptr();
  call.workspace = workspace.mutable_data_ptr();
  const char* error = tile_named(architecture, tile).run(call, reinterpret_cast<cudaStream_t>(stream));
  TORCH_CHECK(!error, "CUTLASS tile ", tile, " for sm_", architecture, ": ", error);
}

// y = (values of W as codes * scales) (x as codes * x_scales)^T + bias; transposed for architecture 80.
void gemm_codes(int64_t architecture, const std::string& tile, const at::Tensor& values, const at::Tensor& metadata,
                const at::Tensor& scales, const at::Tensor& x, const at::Tensor& x_scales, const OptionalTensor& bias,
                const at::Tensor& y, int64_t stream) {
  TORCH_CHECK_VALUE(values.dim() == 2 && x.dim() == 2, "values of shape ", values.sizes(), " and x of shape ",
                    x.sizes(), " must have two dimensions");
  const int64_t out_features = values.size(0), rows = x.size(0), in_features = 2 * values.size(1);
  const bool transposed = architecture == 80, fp8 = values.scalar_type() == at::kFloat8_e4m3fn;
  const int out_step = transposed ? 32 : 8, in_step = transposed ? 128 : 32, step = transposed ? 16 : 1;
  TORCH_CHECK_VALUE(out_features % out_step == 0 && in_features % in_step == 0 && rows % step == 0 && rows > 0,
                    "out_features=", out_features, ", in_features=", in_features, ", rows=", rows,
                    ": must be multiples of ", out_step, ", ", in_step, " and ", step);
  const at::ScalarType dtype = fp8 ? at::kFloat8_e4m3fn : at::kChar;
  CodesCall call{};
  call.values = checked("values", values, {out_features, in_features / 2}, dtype);
  call.metadata = checked("metadata", metadata, {metadata_bytes(architecture, out_features, in_features)}, at::kByte);
  call.scales = checked("scales", scales, {out_features, 1}, fp8 ? at::kFloat : at::kBFloat16);
  call.x = checked("x", x, {rows, in_features}, dtype);
  call.x_scales = static_cast<const float*>(checked("x_scales", x_scales, {rows}, at::kFloat));
  if (bias) call.bias = checked("bias", *bias, {out_features}, at::kBFloat16);
  checked("y", y, {transposed ? out_features : rows, transposed ? rows : out_features}, at::kBFloat16);
  call.y = y.mutable_data_ptr();
  call.out_features = static_cast<int>(out_features);
  call.rows = static_cast<int>(rows);
  call.in_features = static_cast<int>(in_features);
  const std::string name = (fp8 ? "fp8_" : "int8_") + tile;
  const TileOf<CodesCall>& chosen = tile_named<CodesCall>(architecture, name);
  TORCH_CHECK(chosen.workspace_bytes(call) == 0, "CUTLASS tile ", name, " needs a workspace");
  const char* error = chosen.run(call, reinterpret_cast<cudaStream_t>(stream));
  TORCH_CHECK(!error, "CUTLASS tile ", name, " for sm_", architecture, ": ", error);
}

template <typename Call>
std::vector<std::pair<int, std::string>> names() {
  std::vector<std::pair<int, std::string>> all;
  for (const TileOf<Call>& tile : tiles<Call>()) all.emplace_back(tile.architecture, tile.name);
  return all;
}

}  // namespace
}  // namespace proxsparse::gemm

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "CUTLASS's sparse matrix multiplications; csrc/cutlass/gemm.h documents them.";
  const auto without_gil = py::call_guard<py::gil_scoped_release>();
  module.def("tiles", &proxsparse::gemm::names<proxsparse::gemm::Call>);
  module.def("tiles_codes", &proxsparse::gemm::names<proxsparse::gemm::CodesCall>);
  module.def("workspace_bytes", &proxsparse::gemm::workspace_bytes, without_gil);
  module.def("gemm", &proxsparse::gemm::gemm, without_gil);
  module.def("gemm_codes", &proxsparse::gemm::gemm_codes, without_gil);
}
