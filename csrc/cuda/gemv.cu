// The launch parameters of the gemv (gemv.h), and its kernels for values of 16 bits.
#include <algorithm>

#include "gemv.h"

namespace proxsparse::gpu {
namespace {

struct Device {
  int processors, generation;
};

cudaError_t current_device(Device& device) {
  int id = 0;
  cudaError_t status = cudaGetDevice(&id);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&device.processors, cudaDevAttrMultiProcessorCount, id);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&device.generation, cudaDevAttrComputeCapabilityMajor, id);
  return status;
}

// Chooses the launch parameters. If the rows of W do not occupy the GPU, clusters split the columns; fewer thread
// blocks are larger.
GemvPlan plan_launch(const GemvCall& call, const Device& device) {
  const auto addresses = reinterpret_cast<uintptr_t>(call.values) | reinterpret_cast<uintptr_t>(call.indices);
  const bool aligned = addresses % 16 == 0 && call.in_features % int{kChunk} == 0;
  const int groups = !aligned || call.rows > 2 * kColumns ? 4 : call.rows > kColumns ? 2 : 1;
  const int tiles = aligned ? tiles_of(groups, has_windows(call)) : 1;
  const int rows = groups * tiles * kTile, blocks = (call.out_features + rows - 1) / rows;
  const int steps = (call.in_features + int{kStep} - 1) / int{kStep};
  int splits = 1;
  if (device.generation >= 9) {  // has clusters
    while (splits < 8 && 2 * splits * blocks <= device.processors && 2 * splits <= steps) splits *= 2;
  }
  const int most = blocks > device.processors ? 8 : max_warps(has_windows(call));
  GemvCall launched = call;
  const uint32_t of_block = static_cast<uint32_t>(call.m) / 2 - 1;  // windows
  launched.x_blocks = static_cast<uint32_t>(call.x_features / call.m);
  launched.reciprocal = ((1u << 31) + of_block - 1) / of_block;
  launched.splits = splits;
  launched.warps = std::min((steps + splits - 1) / splits * groups, most);
  return {aligned, groups, blocks, launched};
}

}  // namespace

cudaError_t launch_gemv(const GemvCall& call, cudaStream_t stream) {
  if (reinterpret_cast<uintptr_t>(call.x) % 8 != 0) return cudaErrorInvalidValue;
  Device device{};
  const cudaError_t status = current_device(device);
  if (status != cudaSuccess) return status;
  const GemvPlan plan = plan_launch(call, device);
  if (has_windows(call) && !plan.aligned) return cudaErrorMisalignedAddress;  // they have no such kernel
  switch (call.codes) {
    case kPlain:
      return launch<Bits16>(plan, stream);
    case kInt8:
      return launch<Bits8>(plan, stream);
    case kInt4:
      return launch<Bits4>(plan, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace proxsparse::gpu
