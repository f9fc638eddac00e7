// Stands in for the header of the CUDA toolkit, so that a C++ compiler makes csrc/cuda/*.cu run on the CPU: what those
// files use of CUDA, and no more. The threads of a cluster are coroutines: the lanes of a warp switch where they wait
// for each other, warps at __syncthreads, thread blocks at cluster_sync. Each round runs lanes and warps in the
// opposite order of the one before, so that a forgotten barrier shows. The CPU runs one of them at a time.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#define __host__
#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(...)

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorLaunchFailure = 719 };

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
enum cudaLaunchAttributeID {
  cudaLaunchAttributeClusterDimension = 4,
  cudaLaunchAttributeProgrammaticStreamSerialization = 6
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    dim3 clusterDim;
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16, cudaDevAttrComputeCapabilityMajor = 75 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };

inline dim3 threadIdx, blockIdx;

namespace emulated {

constexpr int kLanes = 32, kStackBytes = 1 << 17, kWords = 9, kMaxShared = 227 << 10;
inline int processors = 132, generation = 9;  // of the GPU
inline int code = 90;                         // what the kernels were compiled for
struct Launched {
  int threads, blocks, cluster;  // of a thread block; of the grid; of a cluster
  bool dependent;                // on the kernel before, programmatically
};
inline Launched launched;  // the latest

struct Copy {
  void* target;
  const void* source;
  size_t bytes;
};

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  unsigned index;
  bool finished, previous_ended;  // the kernel before this one, as far as this thread has waited for it
  int collectives;                // how many this lane has come to
  const char* waiting;            // for the other lanes, in this collective
  uint32_t offered[2][kWords];    // to the latest two collectives
  unsigned expected;              // threads that must come to the named barrier that it waits at
  std::vector<Copy> copies;       // asynchronous ones that it has not waited for
};

struct Block {
  dim3 index;
  std::vector<Thread> threads;
  std::vector<char> shared;
};

struct Cluster {
  ucontext_t scheduler;
  std::vector<Block> blocks;
  Block* block;  // that runs, and of it
  Thread* thread;
  Thread* warp;  // its first lane
  void (*body)(void*);
  void* argument;
};
inline Cluster cluster;

inline void enter() {
  cluster.body(cluster.argument);
  cluster.thread->finished = true;
}

// Waits until all lanes are here; then `offered(lane)` is what each of them brought.
struct Collective {
  int parity;
  explicit Collective(const char* name, std::initializer_list<uint32_t> words = {}) {
    Thread& thread = *cluster.thread;
    parity = thread.collectives++ % 2;
    std::copy(words.begin(), words.end(), thread.offered[parity]);
    thread.waiting = name;
    swapcontext(&thread.context, &cluster.scheduler);
  }
  const uint32_t* offered(int lane) const { return cluster.warp[lane].offered[parity]; }
};

// A warp until its lanes have come to their next collective; false if not all of them came to the same one.
inline bool run_warp(Block& block, size_t first, bool backwards) {
  cluster.block = &block;
  cluster.warp = &block.threads[first];
  blockIdx = block.index;
  for (int i = 0; i < kLanes; ++i) {
    cluster.thread = cluster.warp + (backwards ? kLanes - 1 - i : i);
    threadIdx.x = cluster.thread->index;
    swapcontext(&cluster.scheduler, &cluster.thread->context);
  }
  return std::all_of(cluster.warp, cluster.warp + kLanes, [](const Thread& lane) {
    return lane.finished == cluster.warp->finished && (lane.finished || lane.waiting == cluster.warp->waiting);
  });
}

// Of threads in this state, the barrier that all of them wait at; empty if there is none.
inline std::string_view barrier(const std::vector<Thread>& threads) {
  const std::string_view name = threads[0].finished ? "" : threads[0].waiting;
  const auto same = [&](const Thread& thread) { return !thread.finished && thread.waiting == name; };
  return name != "syncwarp" && std::all_of(threads.begin(), threads.end(), same) ? name : "";
}

inline unsigned at_named_barrier(const std::vector<Thread>& threads, std::string_view name) {
  return static_cast<unsigned>(std::count_if(threads.begin(), threads.end(), [&](const Thread& thread) {
    return !thread.finished && thread.waiting == name;
  }));
}

inline void start(Block& block, dim3 index, unsigned threads, size_t shared) {
  block.index = index;
  block.shared.assign(shared, char(0xff));  // as floats: NaN
  block.threads.resize(threads);
  for (unsigned i = 0; i < threads; ++i) {
    Thread& thread = block.threads[i];
    thread.index = i;
    thread.finished = thread.previous_ended = false;
    thread.collectives = 0;
    thread.waiting = "start";
    thread.copies.clear();
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = kStackBytes;
    thread.context.uc_link = &cluster.scheduler;
    makecontext(&thread.context, enter, 0);
  }
}

// False if threads waited for different things, or some had returned while others waited.
inline bool run_cluster() {
  std::vector<std::pair<Block*, size_t>> warps;
  for (Block& block : cluster.blocks) {
    for (size_t first = 0; first < block.threads.size(); first += kLanes) warps.emplace_back(&block, first);
  }
  for (int round = 0;; ++round) {
    std::vector<std::string_view> barriers;
    for (Block& block : cluster.blocks) barriers.push_back(barrier(block.threads));
    const bool all_in_cluster = std::count(barriers.begin(), barriers.end(), "cluster_sync") == int(barriers.size());
    std::vector<bool> open;
    for (const auto& [block, first] : warps) {
      const Thread& lane = block->threads[first];
      const std::string_view name = lane.finished ? "finished" : lane.waiting;
      open.push_back(name == "syncthreads"         ? barriers[block - cluster.blocks.data()] == name
                     : name == "cluster_sync"      ? all_in_cluster
                     : name.starts_with("barrier") ? at_named_barrier(block->threads, name) == lane.expected
                                                   : name != "finished");
    }
    bool ran = false, finished = true;
    for (size_t i = 0; i < warps.size(); ++i) {
      const auto& [block, first] = warps[i];
      if (open[i] && !run_warp(*block, first, round % 2)) return false;
      ran |= open[i];
      finished &= block->threads[first].finished;
    }
    if (finished) return true;
    if (!ran) return false;
    std::reverse(warps.begin(), warps.end());
  }
}

}  // namespace emulated

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? emulated::processors : emulated::generation;
  return cudaSuccess;
}
struct cudaFuncAttributes {
  int ptxVersion;
};
template <typename Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel) {
  attributes->ptxVersion = emulated::code;
  return cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int bytes) {
  return bytes <= emulated::kMaxShared ? cudaSuccess : cudaErrorInvalidValue;
}

template <typename Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Arguments),
                               const Arguments& arguments) {
  const dim3 grid = config->gridDim;
  dim3 shape;
  emulated::launched = {int(config->blockDim.x), int(grid.x * grid.y), 1, false};
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config->attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension)
      shape = attribute.val.clusterDim;
    else
      emulated::launched.dependent = attribute.val.programmaticStreamSerializationAllowed;
  }
  emulated::launched.cluster = int(shape.x * shape.y);
  if (emulated::launched.dependent && emulated::code < 90) return cudaErrorInvalidValue;  // would not wait for x
  if (config->dynamicSmemBytes > size_t(emulated::kMaxShared)) return cudaErrorInvalidValue;
  if (config->blockDim.x > 1024 || config->blockDim.x % emulated::kLanes || shape.x * shape.y > 8) {
    return cudaErrorInvalidValue;
  }
  if (shape.x * shape.y > 1 && emulated::code < 90) return cudaErrorInvalidValue;  // a GPU would not even say so
  if (grid.x == 0 || grid.y == 0 || grid.x % shape.x || grid.y % shape.y) return cudaErrorInvalidValue;
  auto call = std::pair(kernel, arguments);
  emulated::cluster.body = [](void* argument) {
    const auto& [function, values] = *static_cast<decltype(call)*>(argument);
    function(values);
  };
  emulated::cluster.argument = &call;
  emulated::cluster.blocks.resize(shape.x * shape.y);
  for (unsigned y = 0; y < grid.y; y += shape.y) {
    for (unsigned x = 0; x < grid.x; x += shape.x) {
      for (unsigned i = 0; i < shape.x * shape.y; ++i) {
        emulated::start(emulated::cluster.blocks[i], {x + i % shape.x, y + i / shape.x}, config->blockDim.x,
                        config->dynamicSmemBytes);
      }
      if (!emulated::run_cluster()) return cudaErrorLaunchFailure;
    }
  }
  return cudaSuccess;
}

inline void __syncwarp() { emulated::Collective("syncwarp"); }
inline void __syncthreads() { emulated::Collective("syncthreads"); }
inline unsigned __ballot_sync(unsigned, bool yes) {
  const emulated::Collective all("ballot", {yes});
  unsigned lanes = 0;
  for (int i = 0; i < emulated::kLanes; ++i) lanes |= all.offered(i)[0] << i;
  return lanes;
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  const emulated::Collective all("reduce_max", {value});
  for (int i = 0; i < emulated::kLanes; ++i) value = std::max(value, all.offered(i)[0]);
  return value;
}

inline int __popc(unsigned bits) { return std::popcount(bits); }
inline unsigned __float_as_uint(float number) { return std::bit_cast<unsigned>(number); }
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; }
inline float __double2float_ru(double x) {
  const float nearest = static_cast<float>(x);
  return nearest < x ? std::nextafter(nearest, std::numeric_limits<float>::infinity()) : nearest;
}

// Byte i of the result is byte (selector >> 4 i & 7) of low, followed by high.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t both = uint64_t{high} << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(both >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return result;
}

#include "tensor_cores.h"
