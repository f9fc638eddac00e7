// proxsparse._C_cutlass: CUTLASS's sparse matrix multiplications, for proxsparse/ops/backends/cutlass.py. As in
// csrc/cuda/bindings.cpp, the stream is a number, and the device of the tensors must be the current one.
#include <torch/csrc/utils/pybind.h>

#include <string>

#include "../checks.h"
#include "gemm.h"

namespace proxsparse::gemm {
namespace {

const Tile& tile_named(int64_t architecture, const std::string& name) {
  for (const Tile& tile : tiles()) {
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

std::vector<std::pair<int, std::string>> names() {
  std::vector<std::pair<int, std::string>> all;
  for (const Tile& tile : tiles()) all.emplace_back(tile.architecture, tile.name);
  return all;
}

}  // namespace
}  // namespace proxsparse::gemm

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "CUTLASS's sparse matrix multiplications; csrc/cutlass/gemm.h documents them.";
  const auto without_gil = py::call_guard<py::gil_scoped_release>();
  module.def("tiles", &proxsparse::gemm::names);
  module.def("workspace_bytes", &proxsparse::gemm::workspace_bytes, without_gil);
  module.def("gemm", &proxsparse::gemm::gemm, without_gil);
}
