// proxsparse._C_cutlass: CUTLASS's sparse matrix multiplications, for proxsparse/inference/backends/cutlass.py. As in
// csrc/cuda/bindings.cpp the stream is a number, and the device of the tensors must be the current one.
#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>

#include "gemm.h"

namespace proxsparse::gemm {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

const Tile& tile_named(int64_t architecture, const std::string& name) {
  for (const Tile& tile : tiles()) {
    if (tile.architecture == architecture && tile.name == name) return tile;
  }
  TORCH_CHECK_VALUE(false, "tile ", name, " for sm_", architecture, " was not built; install again on this machine");
}

// Contiguous, on the GPU, of these sizes, at a multiple of 16 bytes.
const void* checked(const char* name, const at::Tensor& tensor, at::IntArrayRef sizes, at::ScalarType dtype) {
  const void* data = tensor.const_data_ptr();
  TORCH_CHECK_VALUE(tensor.is_cuda() && tensor.is_contiguous() && tensor.sizes() == sizes &&
                        tensor.scalar_type() == dtype && reinterpret_cast<uintptr_t>(data) % 16 == 0,
                    name, " is ", tensor.scalar_type(), " ", tensor.sizes(), " on ", tensor.device(),
                    ": it must be a contiguous CUDA tensor, ", dtype, " ", sizes, ", at a multiple of 16 bytes");
  return data;
}

Call call_of(const at::Tensor& values, const at::Tensor& x) {
  TORCH_CHECK_VALUE(values.dim() == 2 && x.dim() == 2, "values and x must be matrices");
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
  TORCH_CHECK_VALUE(!(transposed && bias), "the tiles for sm_80 know no bias");
  Call call = call_of(values, x);
  const int64_t padded = (out_features + 63) / 64 * 64 * ((columns + 127) / 128 * 16);
  call.metadata = checked("metadata", metadata, {transposed ? out_features * columns / 8 : padded}, at::kByte);
  if (bias) call.bias = checked("bias", *bias, {out_features}, at::kBFloat16);
  checked("y", y, {transposed ? out_features : rows, transposed ? rows : out_features}, at::kBFloat16);
  call.y = y.mutable_data_ptr();
  call.workspace = workspace.mutable_data_ptr();
  const char* wrong = tile_named(architecture, tile).run(call, reinterpret_cast<cudaStream_t>(stream));
  TORCH_CHECK(!wrong, "CUTLASS tile ", tile, " for sm_", architecture, ": ", wrong);
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
