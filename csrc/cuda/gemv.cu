// y = x W^T + bias for up to 16 rows of x: a matter of reading the packed W once. proxsparse/reference/pack.py has its form.
//
// Tensor cores multiply a 2:4 tile by columns and pick the numbers that meet the kept weights themselves (mma_sp of
// sparse_mma.h). Which weight stands where in the tile is free, as long as the columns and the places follow. It is
// chosen so that 16 bytes of values, as they lie in memory, are one operand of a lane: packed_tile.h.
//
// Row b of x becomes two columns: 2b of what meets even blocks, 2b+1 of what meets odd ones. Then y is the sum of the
// elements [g, 2b] and [g+8, 2b+1] of the product; lane 4g+b holds both. So a multiplication serves 4 rows of x.
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>
#include <utility>

#include "launch.h"
#include "number.h"
#include "packed_tile.h"
#include "sparse_mma.h"

namespace proxsparse::gpu {
namespace {

constexpr int kColumns = 4;                          // rows of x a multiplication
constexpr int kXWords = kStep / 2;                   // of a row of x in a step
constexpr int kXBytes = 2 * kColumns * 4 * kXWords;  // of shared memory for each warp: its rows of x in two steps
// Warps of a thread block at most, so that the sums and the weights that are on their way fit into registers.
constexpr int max_warps(int groups, int tiles) { return groups > 1 && tiles == 4 ? 8 : 16; }

struct GemvArguments {
  GemvCall call;  // warps: a multiple of the groups; splits: the thread blocks of a cluster
};

// ------------------------------------------------------------------------- x

// The part of a step of x that one warp brings to shared memory: kColumns rows from `first`. Each is [kChunks][8] units
// of 16 bytes. Unit 4 * odd + t of a chunk holds what column 2b + odd of a multiplication takes as numbers 8t to 8t+7:
// blocks n = 4a + 2h + odd of x, for h = t / 2 and two a from 2 * (t % 2). It stands at t ^ b instead of t: then
// neither this nor load_matrices accesses a memory bank twice at once.
template <bool kWhole>  // else columns after the end of the rows become zeros
__device__ void stage(const GemvCall& call, int first, uint32_t column, uint32_t* shared) {
  const uint32_t block = static_cast<uint32_t>(lane()), columns = static_cast<uint32_t>(call.in_features);
  const uint32_t a = block / 4 % 4, odd = block % 2, t = a / 2 + (block & 2);
  PROXSPARSE_UNROLL
  for (uint32_t b = 0; b < kColumns; ++b) {
    const int row = first + static_cast<int>(b);
    if (row >= call.rows) break;
    uint32_t* target = shared + (b * kXWords + block / 16 * 32 + (4 * odd + (t ^ b)) * 4 + a % 2 * 2);
    PROXSPARSE_UNROLL
    for (uint32_t half = 0; half < 2; ++half) {  // of the chunks
      const uint32_t place = column + half * kStep / 2 + 4 * block;
      const bool exists = kWhole || place < columns;
      const uint32_t source = static_cast<uint32_t>(row) * columns + (exists ? place : 0);
      copy_8_bytes(target + half * kXWords / 2, static_cast<const uint16_t*>(call.x) + source, exists);
    }
  }
}

// The unit that this lane brings to load_matrices, for chunk 0 and the first kColumns rows.
__device__ inline uint32_t unit_of_lane() {
  const uint32_t t = static_cast<uint32_t>(lane()) / 8, b = static_cast<uint32_t>(lane()) / 2 % 4, odd = lane() % 2;
  return b * kXWords + (4 * odd + (t ^ b)) * 4;
}

// ------------------------------------------------------------------------- one step

// Adds a step of all tiles to the sums. With a Next, what has been multiplied is replaced by the step at `next`, so
// that the memory is never idle. x: what this lane reads of the step.
template <typename Format, typename Next, int kGroups, int kTiles>
__device__ void add_step(Weights (&weights)[kTiles], const uint32_t* x, const Packed<kTiles>& packed, uint32_t next,
                         float (&sums)[kTiles][kGroups][4]) {
  PROXSPARSE_UNROLL
  for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
    uint32_t places[kTiles];
    PROXSPARSE_UNROLL
    for (int i = 0; i < kTiles; ++i) places[i] = places_of_lane(weights[i].places[chunk % 2]);
    PROXSPARSE_UNROLL
    for (int group = 0; group < kGroups; ++group) {
      // columns without a row of x have arbitrary numbers, which do not affect the others
      const Words4 columns = load_matrices(x + (group * kColumns * kXWords + chunk * 32));
      PROXSPARSE_UNROLL
      for (int i = 0; i < kTiles; ++i) {
        mma_sp(Format(), chunk / 2, sums[i][group], weights[i].values[chunk].word, columns.word, places[i]);
      }
    }
    if constexpr (!std::is_void_v<Next>) {
      PROXSPARSE_UNROLL
      for (int i = 0; i < kTiles; ++i) {
        weights[i].values[chunk] = Next::values(packed, i, next, chunk);
        if (chunk >= 2) weights[i].places[chunk % 2] = Next::places(packed, i, next, chunk % 2);
      }
    }
  }
}

// ------------------------------------------------------------------------- all of them

// kGroups neighbouring warps share x: they take the same columns, and each its own kTiles tiles. A thread block has
// `slots` such teams. A team takes every (slots * splits)-th step of the rows of its thread block, so that the teams
// together read long pieces of each row. Then the teams add up, and the thread blocks of a cluster: in a fixed order.
template <typename Format, int kGroups, int kTiles, bool kAligned>
__global__ void __launch_bounds__(max_warps(kGroups, kTiles) * kLanes) gemv_kernel(GemvArguments arguments) {
  constexpr int kWarpRows = kTiles * kTile, kBlockRows = kGroups * kWarpRows;
  const GemvCall& call = arguments.call;
  const int slots = call.warps / kGroups, splits = call.splits, rank = static_cast<int>(blockIdx.y);
  const int member = warp() % kGroups, slot = warp() / kGroups;
  const int first = static_cast<int>(blockIdx.x) * kBlockRows;
  const Packed<kTiles> packed(call, first + member * kWarpRows);
  const uint32_t columns = packed.columns, stride = static_cast<uint32_t>(splits * slots) * kStep;
  uint32_t column = static_cast<uint32_t>(rank * slots + slot) * kStep;

  // x of this step and of the next one, [kGroups * kColumns] rows each; a member brings its kColumns.
  uint32_t* x = reinterpret_cast<uint32_t*>(dynamic_shared()) + slot * 2 * kGroups * kColumns * kXWords;
  uint32_t* x_next = x + kGroups * kColumns * kXWords;
  const uint32_t mine = member * kColumns * kXWords, unit = unit_of_lane();
  const auto share = [&] {  // x has arrived, and no warp still reads x_next
    wait_for_copies();
    sync_warps<kGroups>(slot);
  };
  float sums[kTiles][kGroups][4] = {};
  Weights weights[kTiles];

  // With GemvCall::dependent the previous kernel may still be running until wait_for_previous_kernel returns. Before
  // that, only weights are read: the caller guarantees that they are constant. The previous kernel may still write x
  // and read the memory of y, so both are used only afterwards. The next kernel may start at once: if it was launched
  // in this way, it waits until this kernel has ended; any other starts after this one has ended anyway.
  allow_next_kernel();
  const bool whole = kAligned && column + kStep <= columns;
  if (whole) load_step<Aligned<true>>(weights, packed, column);
  wait_for_previous_kernel();
  if (whole) {
    stage<true>(call, member * kColumns, column, x + mine);
#pragma unroll 1
    for (; column + stride + kStep <= columns; column += stride) {
      share();
      stage<true>(call, member * kColumns, column + stride, x_next + mine);
      add_step<Format, Aligned<true>>(weights, x + unit, packed, column + stride, sums);
      std::swap(x, x_next);
    }
    share();
    add_step<Format, void>(weights, x + unit, packed, 0, sums);
    std::swap(x, x_next);
    column += stride;
  }
#pragma unroll 1
  for (; column < columns; column += stride) {  // where the weights are aligned, at most one
    stage<false>(call, member * kColumns, column, x + mine);
    load_step<std::conditional_t<kAligned, Aligned<false>, Unaligned>>(weights, packed, column);
    share();
    add_step<Format, void>(weights, x + unit, packed, 0, sums);
    std::swap(x, x_next);
  }

  __syncthreads();  // from here on the shared memory holds sums, [slots + 1][rows][kBlockRows]
  auto* of_slots = reinterpret_cast<float*>(dynamic_shared());
  const int wanted = call.rows * kBlockRows, threads = call.warps * kLanes;
  float* of_block = of_slots + slots * wanted;
  PROXSPARSE_UNROLL
  for (int i = 0; i < kTiles * kGroups; ++i) {
    const auto& sum = sums[i / kGroups][i % kGroups];
    const int row = i % kGroups * kColumns + lane() % 4;
    const int place = row * kBlockRows + member * kWarpRows + i / kGroups * kTile + lane() / 4;
    if (row < call.rows) of_slots[slot * wanted + place] = sum[0] + sum[3];
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < wanted; i += threads) {
    float sum = 0;
    for (int s = 0; s < slots; ++s) sum += of_slots[s * wanted + i];
    of_block[i] = sum;
  }
  if (splits > 1) cluster_sync();
  const auto* bias = static_cast<const uint16_t*>(call.bias);
  auto* y = static_cast<uint16_t*>(call.y);
  for (int i = static_cast<int>(threadIdx.x); rank == 0 && i < wanted; i += threads) {  // what it wrote itself
    const int row = first + i % kBlockRows;
    if (row >= call.out_features) continue;
    float sum = of_block[i];
    for (int other = 1; other < splits; ++other) sum += load_from_block(of_block + i, other);
    if (bias) sum += Format::load(bias[row]);
    y[int64_t{i / kBlockRows} * call.out_features + row] = Format::store(sum);
  }
  if (splits > 1) cluster_meet();  // the others stay until their sums have been read: before y is stored
}

// ------------------------------------------------------------------------- launching

struct Device {
  int processors, generation;
};

cudaError_t current(Device& device) {
  int id = 0;
  cudaError_t status = cudaGetDevice(&id);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&device.processors, cudaDevAttrMultiProcessorCount, id);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&device.generation, cudaDevAttrComputeCapabilityMajor, id);
  return status;
}

struct Plan {
  bool aligned;
  int groups, tiles, blocks;  // of 4 rows of x; of a warp; thread blocks along the rows of W
  GemvArguments arguments;
};

int power_of_two(int number, int most) {  // the largest that is not above either
  int power = 1;
  while (2 * power <= std::min(number, most)) power *= 2;
  return power;
}

// What the call leaves open (0) is chosen here, not tuned on a GPU. What a GPU cannot run is replaced by the nearest
// number that it can. Where the rows of W do not occupy the GPU, clusters split its columns; the fewer thread blocks,
// the larger they are.
Plan plan(const GemvCall& call, const Device& device) {
  const auto bits = reinterpret_cast<uintptr_t>(call.values) | reinterpret_cast<uintptr_t>(call.indices);
  const bool aligned = bits % 16 == 0 && call.in_features % int{kChunk} == 0;
  const int groups = !aligned || call.rows > 2 * kColumns ? 4 : call.rows > kColumns ? 2 : 1;
  const int tiles = !aligned ? 1 : power_of_two(call.tiles > 0 ? call.tiles : groups == 1 ? 4 : 2, 4);
  const int rows = groups * tiles * kTile, blocks = (call.out_features + rows - 1) / rows;
  const int steps = (call.in_features + int{kStep} - 1) / int{kStep};
  int splits = 1;
  while (splits < 8 && 2 * splits * blocks <= device.processors && 2 * splits <= steps) splits *= 2;
  if (call.splits > 0) splits = std::min(call.splits, 8);
  if (device.generation < 9) splits = 1;  // no clusters
  const int most = max_warps(groups, tiles), fit = (steps + splits - 1) / splits * groups;
  const int warps = call.warps > 0 ? call.warps : std::min(blocks > device.processors ? 8 : 16, fit);
  GemvArguments arguments{call};
  arguments.call.splits = splits;
  arguments.call.warps = std::max(std::min(warps, most) / groups, 1) * groups;
  return {aligned, groups, tiles, blocks, arguments};
}

template <typename Format, int kGroups, int kTiles, bool kAligned>
cudaError_t launch(const Plan& plan, cudaStream_t stream) {
  GemvArguments arguments = plan.arguments;
  GemvCall& call = arguments.call;
  const auto kernel = gemv_kernel<Format, kGroups, kTiles, kAligned>;
  if (call.splits > 1 || call.dependent) {  // code for older GPUs that the driver compiled for this one has neither
    cudaFuncAttributes attributes{};
    const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
    if (status != cudaSuccess) return status;
    if (attributes.ptxVersion < 90) call.splits = 1, call.dependent = false;
  }
  const int shared = call.warps * kXBytes;  // the sums need less
  if (shared > 48 << 10) {                  // more than this has to be requested
    const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (status != cudaSuccess) return status;
  }
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(plan.blocks), static_cast<unsigned>(call.splits));
  config.blockDim = dim3(static_cast<unsigned>(call.warps * kLanes));
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.stream = stream;
  config.attrs = attributes;
  if (call.splits > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {1, static_cast<unsigned>(call.splits), 1};
  }
  if (call.dependent) {
    cudaLaunchAttribute& early = attributes[config.numAttrs++];
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, arguments);
}

template <typename Format, int kGroups>
cudaError_t launch(const Plan& plan, cudaStream_t stream) {
  if (plan.tiles == 4) return launch<Format, kGroups, 4, true>(plan, stream);
  if (plan.tiles == 2) return launch<Format, kGroups, 2, true>(plan, stream);
  return launch<Format, kGroups, 1, true>(plan, stream);
}

template <typename Format>
cudaError_t launch(const Plan& plan, cudaStream_t stream) {
  if (!plan.aligned) return launch<Format, 4, 1, false>(plan, stream);
  if (plan.groups == 4) return launch<Format, 4>(plan, stream);
  if (plan.groups == 2) return launch<Format, 2>(plan, stream);
  return launch<Format, 1>(plan, stream);
}

}  // namespace

cudaError_t launch_gemv(const GemvCall& call, cudaStream_t stream) {
  if (reinterpret_cast<uintptr_t>(call.x) % 8 != 0) return cudaErrorInvalidValue;
  Device device{};
  const cudaError_t status = current(device);
  if (status != cudaSuccess) return status;
  switch (call.type) {
    case Type::kBFloat16:
      return launch<BFloat16>(plan(call, device), stream);
    case Type::kFloat16:
      return launch<Float16>(plan(call, device), stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace proxsparse::gpu
