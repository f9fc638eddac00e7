// The functions of the CUDA runtime that the launchers of csrc call, linked into each library instead of the real ones.
// Launches go to gpu.py.
#include <cstring>
#include <map>
#include <string>

#include "launch.h"
#pragma GCC visibility push(hidden)  // from other libraries, which may need the real ones
#include <cuda_runtime.h>

using Hook = int (*)(const char* kernel, Launch*, void** arguments);

namespace {

Hook hook;
int processors, generation, code, shared_limit;  // of the GPU; code: of the kernels

struct Kernel {
  std::string name;
  size_t shared_allowed = 48 << 10;  // dynamic
};
std::map<const void*, Kernel>& kernels() {
  static std::map<const void*, Kernel> all;
  return all;
}

cudaError_t run(const void* function, dim3 grid, dim3 block, dim3 cluster, size_t shared, void** arguments) {
  const Kernel& kernel = kernels().at(function);
  if (shared > kernel.shared_allowed) return cudaErrorInvalidValue;
  Launch call{{grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, {cluster.x, cluster.y, cluster.z}, u32(shared)};
  return cudaError_t(hook(kernel.name.c_str(), &call, arguments));
}
cudaLaunchConfig_t configured;

}  // namespace

extern "C" __attribute__((visibility("default"))) void configure(Hook function, int device_processors,
                                                                 int device_generation, int ptx, int shared) {
  hook = function, processors = device_processors, generation = device_generation, code = ptx, shared_limit = shared;
}

extern "C" {

void** __cudaRegisterFatBinary(void* binary) { return static_cast<void**>(binary); }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  kernels()[function].name = name;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  return std::memcpy(kernel, &function, sizeof function), cudaSuccess;
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st*) {
  configured = {grid, block, shared};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void*) {
  *grid = configured.gridDim, *block = configured.blockDim, *shared = configured.dynamicSmemBytes;
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared,
                               cudaStream_t) {
  return run(kernel, grid, block, dim3(), shared, arguments);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
  dim3 cluster;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const auto& [id, pad, value] = config->attrs[i];
    if (id != cudaLaunchAttributeClusterDimension) return cudaErrorInvalidValue;
    cluster = dim3(value.clusterDim.x, value.clusterDim.y, value.clusterDim.z);
  }
  return run(function, config->gridDim, config->blockDim, cluster, config->dynamicSmemBytes, arguments);
}
cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value > shared_limit) return cudaErrorInvalidValue;
  kernels().at(function).shared_allowed = value;
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  return attributes->ptxVersion = code, cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  if (attribute == cudaDevAttrMultiProcessorCount) return *value = processors, cudaSuccess;
  if (attribute == cudaDevAttrComputeCapabilityMajor) return *value = generation, cudaSuccess;
  return cudaErrorInvalidValue;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "the launch failed"; }
}
#pragma GCC visibility pop
