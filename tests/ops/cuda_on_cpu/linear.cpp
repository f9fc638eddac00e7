// The launchers of packed weights as C functions, for ctypes.
#include "../../../csrc/cuda/launch.h"

using namespace proxsparse::gpu;

extern "C" int gemv(const void* x, const void* values, const uint8_t* indices, const void* bias, void* y, int rows,
                    int out_features, int in_features, int dtype, int warps, int splits, int tiles, bool dependent,
                    int processors, int generation, int code) {
  emulated::processors = processors, emulated::generation = generation, emulated::code = code;
  return launch_gemv({x, values, indices, bias, y, rows, out_features, in_features,
                      static_cast<proxsparse::Dtype>(dtype), warps, splits, tiles, dependent},
                     nullptr);
}

// threads of a thread block, thread blocks, thread blocks of a cluster, programmatic dependence: of the latest launch
extern "C" void launched(int* numbers) {
  const auto& launch = emulated::launched;
  numbers[0] = launch.threads, numbers[1] = launch.blocks, numbers[2] = launch.cluster, numbers[3] = launch.dependent;
}

extern "C" int pack(void* weight, void* values, uint8_t* indices, int* infeasible, int64_t rows, int in_features,
                    int bytes_of_weight) {
  const proxsparse::PackCall call{weight, values, indices, rows, in_features};
  return infeasible ? launch_pack(call, bytes_of_weight, infeasible, nullptr)
                    : launch_unpack(call, bytes_of_weight, nullptr);
}

extern "C" int metadata(const uint8_t* indices, uint8_t* metadata, int out_features, int in_features,
                        int architecture) {
  return launch_metadata({indices, metadata, out_features, in_features, architecture}, nullptr);
}
