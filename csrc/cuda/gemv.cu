// y = x W^T + bias for up to 16 rows of x: a matter of reading the packed W once. proxsparse/packed.py has its form.
//
// Tensor cores multiply a 2:4 tile by columns and pick the numbers that meet the kept weights themselves (mma_sp of
// sparse_mma.h). Which weight stands where in the tile is free, as long as the columns and the places follow. It is
// chosen so that 16 bytes of values, as they lie in memory, are one operand of a lane:
//
// A tile is 8 rows of W by a chunk of 64 columns, which are 16 blocks. Lane 4g+q reads blocks 4q+j, j = 0 to 3, of row
// g. To mma_sp the even j are row g and the odd j are row g+8; j = 0 and 1 are its block q, j = 2 and 3 its block q+4.
// Row b of x becomes two columns: 2b of what meets even blocks, 2b+1 of what meets odd ones. Then y is the sum of the
// elements [g, 2b] and [g+8, 2b+1] of the product; lane 4g+b holds both.
//
// A step is 4 chunks. mma_sp asks lanes q = 0 and 1 for the places of chunks 0 and 1, lanes 2 and 3 for those of chunks
// 2 and 3; the even lane for j = 0 and 1, the odd one for j = 2 and 3. So each reads 16 of the 32 bytes and uses half.
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "launch.h"
#include "number.h"
#include "sparse_mma.h"

namespace proxsparse::gpu {
namespace {

constexpr int kTile = 8;                                                // rows of W
constexpr uint32_t kChunk = 64, kChunks = 4, kStep = kChunk * kChunks;  // columns
constexpr int kColumns = 4;                                             // rows of x a multiplication
constexpr int kXWords = kStep / 2;                                      // of a row of x in a step
// Tiles of a thread block, for groups of 4 rows of x: as many as leave registers for the sums.
constexpr int tiles_of(int groups) { return groups == 4 ? 2 : 4; }
// 16 rows of x take so much shared memory that two thread blocks of 8 warps fit.
constexpr int max_warps(int groups) { return groups == 4 ? 8 : 16; }

struct GemvArguments {
  GemvCall call;
  int warps, splits;  // of a thread block; thread blocks of a cluster
};

// The packed rows of a thread block. Beyond the last row a lane reads that again, and nobody wants the result.
template <int kTiles>
struct Packed {
  const uint16_t* values;
  const uint8_t* indices;
  uint32_t columns, row[kTiles];

  __device__ Packed(const GemvCall& call, int first) : columns(static_cast<uint32_t>(call.in_features)) {
    values = static_cast<const uint16_t*>(call.values) + int64_t{first} * (call.in_features / 2);
    indices = call.indices + int64_t{first} * ((call.in_features + 7) / 8);
    PROXSPARSE_UNROLL
    for (int i = 0; i < kTiles; ++i) {
      row[i] = static_cast<uint32_t>(std::min(i * kTile + lane() / 4, call.out_features - first - 1));
    }
  }
};

// What a lane holds of a step of a tile: 4 blocks of every chunk, and the places of two chunks.
struct Weights {
  Words4 values[kChunks];
  Words2 places[2];
};

__device__ inline uint32_t lane_of_row() { return static_cast<uint32_t>(lane()) % 4; }

// ------------------------------------------------------------------------- reading: 16 bytes at once

template <bool kWhole>                   // of a step that lies in the row; else parts of it may be behind its end
struct Aligned {                         // the columns are a multiple of 64, and all begins at a multiple of 16 bytes
  static constexpr int kRowsAtOnce = 2;  // of x

  template <int kTiles>
  static __device__ void load(Weights& weights, const Packed<kTiles>& packed, int tile, uint32_t column) {
    const uint32_t q = lane_of_row(), start = packed.row[tile] * packed.columns + column;
    PROXSPARSE_UNROLL
    for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
      if (!kWhole) weights.values[chunk] = {};
      if (kWhole || column + chunk * kChunk < packed.columns) {
        const auto* values = reinterpret_cast<const Words4*>(packed.values + (start / 2 + q * 8));
        weights.values[chunk] = load_once(values + chunk * (kChunk / 16));
      }
    }
    PROXSPARSE_UNROLL
    for (uint32_t i = 0; i < 2; ++i) {
      if (!kWhole) weights.places[i] = {kAnyPlaces, kAnyPlaces};
      if (kWhole || column + (q / 2 * 2 + i) * kChunk < packed.columns) {
        weights.places[i] = load_once(reinterpret_cast<const Words2*>(packed.indices + (start / 8 + q / 2 * 16)) + i);
      }
    }
  }

  // Two neighbours of a row of x, at `column`.
  static __device__ uint32_t pair(const uint16_t* x, uint32_t column, uint32_t columns) {
    return kWhole || column < columns ? *reinterpret_cast<const uint32_t*>(x) : 0;
  }
};

// ------------------------------------------------------------------------- reading: number by number

struct Anywhere {  // the columns are a multiple of 4
  static constexpr int kRowsAtOnce = 1;

  static __device__ uint32_t pair(const uint16_t* numbers, uint32_t place, uint32_t size) {
    return place < size ? numbers[0] | uint32_t{numbers[1]} << 16 : 0;
  }

  // The nibbles of 8 blocks.
  static __device__ uint32_t places(const uint8_t* indices, uint32_t start, uint32_t first, uint32_t blocks) {
    uint32_t word = kAnyPlaces;
    PROXSPARSE_UNROLL
    for (uint32_t byte = 0; byte < 4; ++byte) {
      const uint32_t block = first + 2 * byte, mask = block + 1 < blocks ? 0xffu : block < blocks ? 0x0fu : 0u;
      if (mask) word = (word & ~(mask << 8 * byte)) | (indices[start + block / 2] & mask) << 8 * byte;
    }
    return word;
  }

  template <int kTiles>
  static __device__ void load(Weights& weights, const Packed<kTiles>& packed, int tile, uint32_t column) {
    const uint32_t q = lane_of_row(), row = packed.row[tile], columns = packed.columns, bytes = (columns + 7) / 8;
    PROXSPARSE_UNROLL
    for (uint32_t i = 0; i < 4 * kChunks; ++i) {
      const uint32_t value = (column + i / 4 * kChunk) / 2 + q * 8 + i % 4 * 2;
      weights.values[i / 4].word[i % 4] = pair(packed.values + (row * (columns / 2) + value), value, columns / 2);
    }
    PROXSPARSE_UNROLL
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t block = (column + q / 2 * 2 * kChunk) / 4 + i * 8;
      weights.places[i / 2].word[i % 2] = places(packed.indices, row * bytes, block, columns / 4);
    }
  }
};

// ------------------------------------------------------------------------- one step

// x of this step to the shared memory of the warp, as [rows][kChunks][2][4] times four pairs: those that lane 4n+q of a
// multiplication takes at once for its column n = 2b or 2b+1.
template <typename Reading>
__device__ void stage(const GemvCall& call, uint32_t column, uint32_t* shared) {
  const uint32_t i = static_cast<uint32_t>(lane()), odd = i / 4 % 2, q = i % 4, columns = call.in_features;
  const uint32_t first = column + i / 8 * kChunk + 16 * (q / 2) + 4 * odd + 2 * (q % 2);
  const auto* x = static_cast<const uint16_t*>(call.x);
#pragma unroll Reading::kRowsAtOnce
  for (int row = 0; row < call.rows; ++row) {
    const uint16_t* place = x + (static_cast<uint32_t>(row) * columns + first);
    reinterpret_cast<Words4*>(shared + row * kXWords)[i] = {
        Reading::pair(place, first, columns), Reading::pair(place + 32, first + 32, columns),
        Reading::pair(place + 8, first + 8, columns), Reading::pair(place + 40, first + 40, columns)};
  }
}

// Of the places of a chunk (nibble 4r+j for block j of lane r) those with the two j that this lane is asked for: the
// first j of all r in the lower half, the second in the upper half.
__device__ inline uint32_t places_of_lane(Words2 chunk) {
  const uint32_t both = __byte_perm(chunk.word[0], chunk.word[1], lane() % 2 ? 0x7531 : 0x6420);
  const uint32_t differ = (both ^ both >> 4) & 0x00f000f0u;
  return __byte_perm(both ^ differ ^ differ << 4, 0, 0x3120);
}

// `kTogether` tiles are in flight at once: as many as there are registers for.
template <typename Format, int kTogether, typename Reading, int kGroups, int kTiles>
__device__ void add_step(const GemvCall& call, const Packed<kTiles>& packed, uint32_t column, uint32_t* x,
                         float (&sums)[kTiles][kGroups][4]) {
  PROXSPARSE_UNROLL
  for (int first = 0; first < kTiles; first += kTogether) {
    Weights weights[kTogether];
    PROXSPARSE_UNROLL
    for (int i = 0; i < kTogether; ++i) Reading::load(weights[i], packed, first + i, column);
    if (first == 0) stage<Reading>(call, column, x);
    __syncwarp();
    PROXSPARSE_UNROLL
    for (int chunk = 0; chunk < int{kChunks}; ++chunk) {
      uint32_t places[kTogether];
      PROXSPARSE_UNROLL
      for (int i = 0; i < kTogether; ++i) places[i] = places_of_lane(weights[i].places[chunk % 2]);
      PROXSPARSE_UNROLL
      for (int group = 0; group < kGroups; ++group) {
        // where there is no row of x there is anything: columns do not mix
        const int row = group * kColumns + lane() / 8;
        const Words4 columns = reinterpret_cast<const Words4*>(x + row * kXWords)[chunk * 8 + lane() % 8];
        PROXSPARSE_UNROLL
        for (int i = 0; i < kTogether; ++i) {
          mma_sp(Format(), chunk / 2, sums[first + i][group], weights[i].values[chunk].word, columns.word, places[i]);
        }
      }
    }
  }
  __syncwarp();
}

// ------------------------------------------------------------------------- all of them

// A warp takes every (warps * splits)-th step of the rows of its thread block, so that the warps together read long
// pieces of each row. Then the warps add up, and the thread blocks of a cluster: in a fixed order.
template <typename Format, int kGroups, bool kAligned>
__global__ void __launch_bounds__(max_warps(kGroups) * kLanes, kGroups == 4 && kAligned ? 2 : 1)
    gemv_kernel(GemvArguments arguments) {
  constexpr int kTiles = tiles_of(kGroups), kBlockRows = kTiles * kTile, kTogether = kGroups == 1 ? kTiles : kTiles / 2;
  const GemvCall& call = arguments.call;
  const int warps = arguments.warps, splits = arguments.splits, rank = static_cast<int>(blockIdx.y);
  const int first = static_cast<int>(blockIdx.x) * kBlockRows;
  const Packed<kTiles> packed(call, first);
  auto* x = reinterpret_cast<uint32_t*>(dynamic_shared()) + warp() * kGroups * kColumns * kXWords;
  float sums[kTiles][kGroups][4] = {};

  const uint32_t stride = static_cast<uint32_t>(splits * warps) * kStep;
  uint32_t column = static_cast<uint32_t>(rank * warps + warp()) * kStep;
#pragma unroll 1
  for (; column + kStep <= packed.columns; column += stride) {
    using Reading = std::conditional_t<kAligned, Aligned<true>, Anywhere>;
    add_step<Format, kAligned ? kTogether : 1, Reading>(call, packed, column, x, sums);
  }
  if (column < packed.columns) {
    using Reading = std::conditional_t<kAligned, Aligned<false>, Anywhere>;
    add_step<Format, 1, Reading>(call, packed, column, x, sums);
  }

  __syncthreads();  // from here on the shared memory holds sums, [warps + 1][rows][kBlockRows]
  auto* of_warps = reinterpret_cast<float*>(dynamic_shared());
  const int wanted = call.rows * kBlockRows, threads = warps * kLanes;
  float* of_block = of_warps + warps * wanted;
  PROXSPARSE_UNROLL
  for (int i = 0; i < kTiles * kGroups; ++i) {
    const auto& sum = sums[i / kGroups][i % kGroups];
    const int row = i % kGroups * kColumns + lane() % 4;
    const int place = row * kBlockRows + i / kGroups * kTile + lane() / 4;
    if (row < call.rows) of_warps[warp() * wanted + place] = sum[0] + sum[3];
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < wanted; i += threads) {
    float sum = 0;
    for (int w = 0; w < warps; ++w) sum += of_warps[w * wanted + i];
    of_block[i] = sum;
  }
  if (splits > 1) cluster_sync();
  const auto* bias = static_cast<const uint16_t*>(call.bias);
  auto* y = static_cast<uint16_t*>(call.y);
  for (int i = static_cast<int>(threadIdx.x); rank == 0 && i < wanted; i += threads) {  // what it wrote itself
    float sum = of_block[i];
    for (int other = 1; other < splits; ++other) sum += load_from_block(of_block + i, other);
    const int row = first + i % kBlockRows;
    if (row >= call.out_features) continue;
    if (bias) sum += Format::load(bias[row]);
    y[int64_t{i / kBlockRows} * call.out_features + row] = Format::store(sum);
  }
  if (splits > 1) cluster_sync();  // the others stay until they have been read
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
  int groups, blocks;  // of 4 rows of x; along the rows of W
  GemvArguments arguments;
};

// Where the rows of W do not occupy the GPU, clusters split its columns; the fewer thread blocks, the larger they are.
// Not tuned on a GPU.
Plan plan(const GemvCall& call, const Device& device) {
  const auto bits = reinterpret_cast<uintptr_t>(call.x) | reinterpret_cast<uintptr_t>(call.values) |
                    reinterpret_cast<uintptr_t>(call.indices);
  const bool aligned = bits % 16 == 0 && call.in_features % int{kChunk} == 0;
  const int groups = !aligned || call.rows > 2 * kColumns ? 4 : call.rows > kColumns ? 2 : 1;
  const int rows = tiles_of(groups) * kTile, blocks = (call.out_features + rows - 1) / rows;
  const int steps = (call.in_features + int{kStep} - 1) / int{kStep};
  int splits = 1;
  while (device.generation >= 9 && splits < 8 && 2 * splits * blocks <= device.processors && 2 * splits <= steps) {
    splits *= 2;
  }
  const int warps = blocks > device.processors ? max_warps(4) : max_warps(groups);
  return {aligned, groups, blocks, {call, std::min(warps, (steps + splits - 1) / splits), splits}};
}

template <typename Format, int kGroups, bool kAligned>
cudaError_t launch(const Plan& plan, cudaStream_t stream) {
  GemvArguments arguments = plan.arguments;
  const auto kernel = gemv_kernel<Format, kGroups, kAligned>;
  if (arguments.splits > 1) {  // code for older GPUs that was compiled anew for this one has no clusters
    cudaFuncAttributes attributes{};
    const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
    if (status != cudaSuccess) return status;
    if (attributes.ptxVersion < 90) arguments.splits = 1;
  }
  const int shared = arguments.warps * kGroups * kColumns * kXWords * 4;  // bytes; the sums need less
  if (shared > 48 << 10) {                                                // this much is there without asking
    const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (status != cudaSuccess) return status;
  }
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {1, static_cast<unsigned>(arguments.splits), 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(plan.blocks), static_cast<unsigned>(arguments.splits));
  config.blockDim = dim3(static_cast<unsigned>(arguments.warps * kLanes));
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = arguments.splits > 1;
  return cudaLaunchKernelEx(&config, kernel, arguments);
}

template <typename Format>
cudaError_t launch(const Plan& plan, cudaStream_t stream) {
  if (!plan.aligned) return launch<Format, 4, false>(plan, stream);
  if (plan.groups == 4) return launch<Format, 4, true>(plan, stream);
  if (plan.groups == 2) return launch<Format, 2, true>(plan, stream);
  return launch<Format, 1, true>(plan, stream);
}

}  // namespace

cudaError_t launch_gemv(const GemvCall& call, cudaStream_t stream) {
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
