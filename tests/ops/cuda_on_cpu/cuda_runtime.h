// Stands in for the header of the CUDA toolkit, so that a C++ compiler makes csrc/cuda/*.cu run on the CPU: what those
// files use of CUDA, and no more. The lanes of a warp are coroutines that switch where they wait for each other; each
// round runs them in the opposite order of the one before, so that a forgotten __syncwarp shows. One thread only.
#pragma once

#include <ucontext.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <type_traits>
#include <utility>

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
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  cudaStream_t stream;
};

inline dim3 threadIdx, blockIdx;

namespace emulated {

constexpr int kLanes = 32, kStackBytes = 1 << 17;

struct Lane {
  ucontext_t context;
  char* stack = static_cast<char*>(std::malloc(kStackBytes));
  bool finished;
  int collectives;      // how many this lane has come to
  const char* waiting;  // for the other lanes, in this collective
  uint32_t offered[2];  // to the latest two collectives
};

struct Warp {
  ucontext_t scheduler;
  Lane lanes[kLanes];
  int running;
  void (*body)(void*);
  void* argument;
};
inline Warp warp;

inline void enter() {
  warp.body(warp.argument);
  warp.lanes[warp.running].finished = true;
}

// Waits until all lanes are here; then `offered(lane)` is what each of them brought.
struct Collective {
  int parity;
  Collective(const char* name, uint32_t value) {
    Lane& lane = warp.lanes[warp.running];
    parity = lane.collectives++ % 2;
    lane.offered[parity] = value;
    lane.waiting = name;
    swapcontext(&lane.context, &warp.scheduler);
  }
  uint32_t offered(int lane) const { return warp.lanes[lane].offered[parity]; }
};

// False if the lanes of the warp waited for different things, or some had returned while others waited.
inline bool run_warp(unsigned first_thread, void (*body)(void*), void* argument) {
  warp.body = body;
  warp.argument = argument;
  for (Lane& lane : warp.lanes) {
    lane.finished = false;
    lane.collectives = 0;
    getcontext(&lane.context);
    lane.context.uc_stack.ss_sp = lane.stack;
    lane.context.uc_stack.ss_size = kStackBytes;
    lane.context.uc_link = &warp.scheduler;
    makecontext(&lane.context, enter, 0);
  }
  for (int round = 0;; ++round) {
    for (int i = 0; i < kLanes; ++i) {
      warp.running = round % 2 ? kLanes - 1 - i : i;
      threadIdx.x = first_thread + warp.running;
      swapcontext(&warp.scheduler, &warp.lanes[warp.running].context);
    }
    const Lane& first = warp.lanes[0];
    for (const Lane& lane : warp.lanes) {
      if (lane.finished != first.finished || (!lane.finished && lane.waiting != first.waiting)) return false;
    }
    if (first.finished) return true;
  }
}

}  // namespace emulated

template <typename Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Arguments),
                               const Arguments& arguments) {
  auto call = std::pair(kernel, arguments);
  const auto body = [](void* argument) {
    const auto& [function, values] = *static_cast<decltype(call)*>(argument);
    function(values);
  };
  for (blockIdx.x = 0; blockIdx.x < config->gridDim.x; ++blockIdx.x) {
    for (unsigned thread = 0; thread < config->blockDim.x; thread += emulated::kLanes) {
      if (!emulated::run_warp(thread, body, &call)) return cudaErrorLaunchFailure;
    }
  }
  return cudaSuccess;
}

inline void __syncwarp() { emulated::Collective("syncwarp", 0); }
inline unsigned __ballot_sync(unsigned, bool yes) {
  const emulated::Collective all("ballot", yes);
  unsigned lanes = 0;
  for (int i = 0; i < emulated::kLanes; ++i) lanes |= all.offered(i) << i;
  return lanes;
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  const emulated::Collective all("reduce_max", value);
  for (int i = 0; i < emulated::kLanes; ++i) value = value > all.offered(i) ? value : all.offered(i);
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
