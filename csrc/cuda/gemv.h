// y = x W^T + bias for up to 16 rows of x. The time is that of reading the packed W (proxsparse/reference/pack.py)
// once.
//
// Tensor cores multiply a 2:4 tile by columns, and select the numbers of x at the kept weights themselves (mma_sp in
// sparse_mma.h). The order of the weights within the tile is free if the columns and the places have the same order. It
// is chosen so that a lane reads consecutive bytes: weight_bits.h, also for weights stored as codes of 8 or 4 bits.
//
// Row b of x becomes two columns: column 2b has the numbers for even blocks, column 2b+1 those for odd blocks. Then y
// is the sum of the elements [g, 2b] and [g+8, 2b+1] of the product; lane 4g+b holds both. So one multiplication serves
// 4 rows of x.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>
#include <utility>

#include "launch.h"
#include "number.h"
#include "packed_tile.h"
#include "sparse_mma.h"

namespace proxsparse::gpu {

constexpr int kColumns = 4;                          // rows of x in a multiplication
constexpr int kXWords = kStep / 2;                   // of a row of x in a step
constexpr int kXBytes = 2 * kColumns * 4 * kXWords;  // of shared memory for each warp: its rows of x, for two steps
// The tiles of a warp, for aligned weights and this many groups of kColumns rows of x. With them, the most warps of a
// thread block for which the sums and the weights being loaded fit into registers.
constexpr int tiles_of(int groups, bool windows) { return windows || groups > 1 ? 2 : 4; }
constexpr int max_warps(bool windows) { return windows ? 8 : 16; }

// ------------------------------------------------------------------------- x

// Whether W is packed for windows of x (proxsparse/reference/windows.py). Window number w is that of the pairs of
// columns w + w / (windows of a block) and the next one; in the remainder, which has no such pairs, w + blocks and
// zeros.
inline bool has_windows(const GemvCall& call) { return call.x_features != call.in_features; }

// Copies one warp's part of a step of x to shared memory: kColumns rows from `first` on. Each row is [kChunks][8] units
// of 16 bytes. Unit 4 * odd + t of a chunk has numbers 8t to 8t+7 of column 2b + odd of a multiplication: the
// blocks 4a + 2h + odd of x, with h = t / 2 and two a from 2 * (t % 2) on. It is stored at t ^ b instead of t, so that
// neither this function nor load_matrices has bank conflicts.
template <typename Bits, bool kWindows, bool kWhole>  // otherwise columns after the end of the rows become zeros
__device__ void stage_x(const GemvCall& call, int first, uint32_t column, uint32_t* shared) {
  const uint32_t block = static_cast<uint32_t>(lane());
  const uint32_t x_features = static_cast<uint32_t>(kWindows ? call.x_features : call.in_features);
  const uint32_t a = block / 4 % 4, odd = block % 2, t = a / 2 + (block & 2);
  PROXSPARSE_UNROLL
  for (uint32_t b = 0; b < kColumns; ++b) {
    const int row = first + static_cast<int>(b);
    if (row >= call.rows) break;
    uint32_t* target = shared + (b * kXWords + block / 16 * 32 + (4 * odd + (t ^ b)) * 4 + a % 2 * 2);
    PROXSPARSE_UNROLL
    for (uint32_t half = 0; half < 2; ++half) {  // of the chunks
      const uint32_t place = column + half * kStep / 2 + 4 * Bits::block_of_lane();
      uint32_t* const to = target + half * kXWords / 2;
      const auto* const x = static_cast<const uint16_t*>(call.x);
      const uint32_t first_of_row = static_cast<uint32_t>(row) * x_features;
      if constexpr (kWindows) {
        const uint32_t x_block = std::min(__umulhi(place / 2, call.reciprocal), call.x_blocks);
        const uint32_t start = 2 * (place / 4 + x_block);
        const bool exists = start < x_features, whole = x_block < call.x_blocks;
        copy_bytes<4>(to, x + (first_of_row + (exists ? start : 0)), exists);  // of a multiple of 4 bytes
        copy_bytes<4>(to + 1, x + (first_of_row + (whole ? start + 2 : 0)), whole);
      } else {
        const bool exists = kWhole || place < x_features;
        copy_bytes<8>(to, x + (first_of_row + (exists ? place : 0)), exists);
      }
    }
  }
}

// The unit whose address this lane provides to load_matrices, for chunk 0 and the first kColumns rows.
__device__ inline uint32_t unit_of_lane() {
  const uint32_t t = static_cast<uint32_t>(lane()) / 8, b = static_cast<uint32_t>(lane()) / 2 % 4, odd = lane() % 2;
  return b * kXWords + (4 * odd + (t ^ b)) * 4;
}

// ------------------------------------------------------------------------- one step

// Adds a step of all tiles to the sums. Next, if not void, loads the step at `next` in place of the weights that have
// been multiplied, so that the memory is never idle. x: the first unit of this lane.
template <typename Format, typename Next, typename Bits, int kGroups, int kTiles>
__device__ void add_step(LaneWeights<Bits> (&weights)[kTiles], const uint32_t* x,
                         const PackedTiles<Bits, kTiles>& packed, uint32_t next, float (&sums)[kTiles][kGroups][4]) {
  constexpr uint32_t kPieceChunks = kChunks / Bits::kPieces;
  PROXSPARSE_UNROLL
  for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
    uint32_t places[kTiles];
    Words4 operands[kTiles];
    PROXSPARSE_UNROLL
    for (int i = 0; i < kTiles; ++i) {
      places[i] = places_of_lane(Bits::place_bytes(weights[i].places, chunk));
      operands[i] = Bits::operand(Format(), weights[i].values, chunk);
    }
    PROXSPARSE_UNROLL
    for (int group = 0; group < kGroups; ++group) {
      // columns without a row of x contain arbitrary numbers, which do not affect the other columns
      const Words4 columns = load_matrices(x + (group * kColumns * kXWords + chunk * 32));
      PROXSPARSE_UNROLL
      for (int i = 0; i < kTiles; ++i) {
        mma_sp(Format(), chunk / 2, sums[i][group], operands[i].word, columns.word, places[i]);
      }
    }
    if constexpr (!std::is_void_v<Next>) {
      PROXSPARSE_UNROLL
      for (int i = 0; i < kTiles; ++i) {
        const uint32_t piece = chunk / kPieceChunks;
        if (chunk % kPieceChunks == kPieceChunks - 1) weights[i].values[piece] = Next::values(packed, i, next, piece);
        PROXSPARSE_UNROLL
        for (uint32_t word = 0; word < 2; ++word) {
          if (chunk == Bits::last_chunk_of_places(word)) weights[i].places[word] = Next::places(packed, i, next, word);
        }
      }
    }
  }
}

// ------------------------------------------------------------------------- the kernel

// A team of kGroups neighbouring warps shares x: all process the same columns, and each warp has kTiles tiles of its
// own. A team processes every (teams * splits)-th step of the rows of its thread block, so that the teams together read
// long pieces of each row. At the end, the sums of the teams and of the thread blocks of a cluster are added in a fixed
// order.
template <typename Format, typename Bits, int kGroups, int kTiles, bool kAligned, bool kWindows>
__global__ void __launch_bounds__(max_warps(kWindows) * kLanes) gemv_kernel(GemvCall call) {
  constexpr int kWarpRows = kTiles * kTile, kBlockRows = kGroups * kWarpRows;
  const int teams = call.warps / kGroups, splits = call.splits, rank = static_cast<int>(blockIdx.y);
  const int member = warp() % kGroups, team = warp() / kGroups;
  const int first = static_cast<int>(blockIdx.x) * kBlockRows;
  const PackedTiles<Bits, kTiles> packed(call, first + member * kWarpRows);
  const uint32_t columns = packed.columns, stride = static_cast<uint32_t>(splits * teams) * kStep;
  uint32_t column = static_cast<uint32_t>(rank * teams + team) * kStep;

  // x for this step and for the next one, kGroups * kColumns rows each; a member copies kColumns of them.
  uint32_t* x = reinterpret_cast<uint32_t*>(dynamic_shared()) + team * 2 * kGroups * kColumns * kXWords;
  uint32_t* x_next = x + kGroups * kColumns * kXWords;
  const uint32_t mine = member * kColumns * kXWords, unit = unit_of_lane();
  const auto wait_for_x = [&] {  // until x is in shared memory, and no warp reads x_next any more
    wait_for_copies();
    sync_warps<kGroups>(team);
  };
  float sums[kTiles][kGroups][4] = {};
  LaneWeights<Bits> weights[kTiles];

  const bool whole = kAligned && column + kStep <= columns;
  if (whole) load_step<Aligned<true>>(weights, packed, column);
  __syncwarp();  // the compiler computes no address of x before the loads, which would spill registers
  if (whole) {
    stage_x<Bits, kWindows, true>(call, member * kColumns, column, x + mine);
#pragma unroll 1
    for (; column + stride + kStep <= columns; column += stride) {
      wait_for_x();
      stage_x<Bits, kWindows, true>(call, member * kColumns, column + stride, x_next + mine);
      add_step<Format, Aligned<true>>(weights, x + unit, packed, column + stride, sums);
      std::swap(x, x_next);
    }
    wait_for_x();
    add_step<Format, void>(weights, x + unit, packed, 0, sums);
    std::swap(x, x_next);
    column += stride;
  }
#pragma unroll 1
  for (; column < columns; column += stride) {  // at most one step if the weights are aligned
    stage_x<Bits, kWindows, false>(call, member * kColumns, column, x + mine);
    load_step<std::conditional_t<kAligned, Aligned<false>, Unaligned>>(weights, packed, column);
    wait_for_x();
    add_step<Format, void>(weights, x + unit, packed, 0, sums);
    std::swap(x, x_next);
  }

  __syncthreads();  // from here on, the shared memory has the sums, [teams + 1][rows][kBlockRows]
  auto* team_sums = reinterpret_cast<float*>(dynamic_shared());
  const int results = call.rows * kBlockRows, threads = call.warps * kLanes;
  float* block_sums = team_sums + teams * results;
  PROXSPARSE_UNROLL
  for (int i = 0; i < kTiles * kGroups; ++i) {
    const auto& sum = sums[i / kGroups][i % kGroups];
    const int row = i % kGroups * kColumns + lane() % 4;
    const int place = row * kBlockRows + member * kWarpRows + i / kGroups * kTile + lane() / 4;
    if (row < call.rows) team_sums[team * results + place] = sum[0] + sum[3];
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < results; i += threads) {
    float sum = 0;
    for (int s = 0; s < teams; ++s) sum += team_sums[s * results + i];
    block_sums[i] = sum;
  }
  if (splits > 1) cluster_sync();
  const auto* bias = static_cast<const uint16_t*>(call.bias);
  auto* y = static_cast<uint16_t*>(call.y);
  for (int i = static_cast<int>(threadIdx.x); rank == 0 && i < results;
       i += threads) {  // the sums that this thread wrote
    const int row = first + i % kBlockRows;
    if (row >= call.out_features) continue;
    float sum = block_sums[i];
    for (int other = 1; other < splits; ++other) sum += load_from_block(block_sums + i, other);
    if constexpr (Bits::kStoredAs == kInt8) sum *= Format::load(static_cast<const uint16_t*>(call.scales)[row]);
    if (bias) sum += Format::load(bias[row]);
    y[int64_t{i / kBlockRows} * call.out_features + row] = Format::store(sum);
  }
  if (splits > 1) cluster_arrive_wait();  // the other thread blocks keep their sums in shared memory until here
}

// ------------------------------------------------------------------------- launching

struct GemvPlan {
  bool aligned;
  int groups;     // of 4 rows of x
  int blocks;     // thread blocks along the rows of W
  GemvCall call;  // warps: a multiple of the groups; splits: the thread blocks of a cluster
};

template <typename Format, typename Bits, int kGroups, int kTiles, bool kAligned, bool kWindows = false>
cudaError_t launch(const GemvPlan& plan, cudaStream_t stream) {
  GemvCall call = plan.call;
  const auto kernel = gemv_kernel<Format, Bits, kGroups, kTiles, kAligned, kWindows>;
  if (call.splits > 1) {  // PTX for an older GPU, compiled by the driver, does not support it
    cudaFuncAttributes attributes{};
    const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
    if (status != cudaSuccess) return status;
    if (attributes.ptxVersion < 90) call.splits = 1;
  }
  const int shared = call.warps * kXBytes;  // for x; the sums need less
  if (shared > 48 << 10) {                  // more than this must be requested
    const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (status != cudaSuccess) return status;
  }
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {1, static_cast<unsigned>(call.splits), 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(plan.blocks), static_cast<unsigned>(call.splits));
  config.blockDim = dim3(static_cast<unsigned>(call.warps * kLanes));
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = call.splits > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, call);
}

template <typename Format, typename Bits, int kGroups>
cudaError_t launch(const GemvPlan& plan, cudaStream_t stream) {
  return has_windows(plan.call) ? launch<Format, Bits, kGroups, tiles_of(kGroups, true), true, true>(plan, stream)
                                : launch<Format, Bits, kGroups, tiles_of(kGroups, false), true>(plan, stream);
}

template <typename Format, typename Bits>
cudaError_t launch(const GemvPlan& plan, cudaStream_t stream) {
  if (!plan.aligned) return launch<Format, Bits, 4, 1, false>(plan, stream);
  if (plan.groups == 4) return launch<Format, Bits, 4>(plan, stream);
  if (plan.groups == 2) return launch<Format, Bits, 2>(plan, stream);
  return launch<Format, Bits, 1>(plan, stream);
}

// For each Bits in a file of its own, because they take most of the time of a build.
template <typename Bits>
cudaError_t launch(const GemvPlan& plan, cudaStream_t stream) {
  switch (plan.call.dtype) {
    case kBFloat16:
      return launch<BFloat16, Bits>(plan, stream);
    case kFloat16:
      return launch<Float16, Bits>(plan, stream);
    default:
      return cudaErrorInvalidValue;
  }
}
extern template cudaError_t launch<Bits8>(const GemvPlan& plan, cudaStream_t stream);
extern template cudaError_t launch<Bits4>(const GemvPlan& plan, cudaStream_t stream);

}  // namespace proxsparse::gpu
