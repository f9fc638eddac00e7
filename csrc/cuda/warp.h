// The lanes of a warp, and aligned pieces of memory. Each warp works alone: no function here waits for another warp.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "../prox24_block.h"

namespace proxsparse::gpu {

constexpr int kLanes = 32;
constexpr int kWarps = 4;  // in a thread block
constexpr unsigned kAllLanes = 0xffffffffu;

__device__ inline int lane() { return static_cast<int>(threadIdx.x % kLanes); }
__device__ inline int warp() { return static_cast<int>(threadIdx.x / kLanes); }

// The bits of numbers >= 0 have the order of the numbers; a NaN is above all numbers.
__device__ inline uint32_t ordered_bits(float number) { return __float_as_uint(number); }
__device__ inline uint32_t ordered_bits(double number) { return __float_as_uint(__double2float_ru(number)); }

__device__ inline float warp_maximum(uint32_t bits) { return __uint_as_float(__reduce_max_sync(kAllLanes, bits)); }

// The number of lanes whose condition is true: before this lane, and in the whole warp.
struct LaneCount {
  int before, all;
};
__device__ inline LaneCount count_lanes(bool condition) {
  const unsigned lanes = __ballot_sync(kAllLanes, condition);
  return {__popc(lanes & ((1u << lane()) - 1)), __popc(lanes)};
}

// kCount consecutive numbers in registers, two in each if they have 16 bits. `Words` is loaded and stored at once.
template <typename Storage, int kCount>
struct Piece {
  using Word = std::conditional_t<sizeof(Storage) == 2, uint32_t, Storage>;
  static constexpr int kWords = kCount * sizeof(Storage) / sizeof(Word), kBytes = kCount * sizeof(Storage);
  struct alignas(kBytes < 16 ? kBytes : 16) Words {
    Word word[kWords];
  } words;
};

// The consecutive numbers of a tensor that one warp processes: kPieces pieces for each lane. Neighbouring lanes have
// neighbouring pieces.
template <typename Number, int kPieces, int kPiece>
struct WarpTile {
  using Storage = std::remove_const_t<Number>;
  using Words = typename Piece<Storage, kPiece>::Words;
  static constexpr int kNumbers = kPieces * kPiece * kLanes;

  Number* tensor;
  int64_t first, size;  // the first number of the warp; the numbers of the tensor
  Storage* buffer;      // kNumbers in shared memory, 16-byte aligned
  bool direct;          // the whole tile lies in the tensor and is 16-byte aligned: the buffer is not needed

  __device__ WarpTile(Number* tensor, int64_t first, int64_t size, void* buffer)
      : WarpTile(tensor, first, size, buffer,
                 reinterpret_cast<uintptr_t>(tensor) % 16 == 0 && first + kNumbers <= size) {}

  // For a kernel that decides `direct` once for several tensors.
  __device__ WarpTile(Number* tensor, int64_t first, int64_t size, void* buffer, bool direct)
      : tensor(tensor), first(first), size(size), buffer(static_cast<Storage*>(buffer)), direct(direct) {}

  // Numbers after the end of the tensor are loaded as zeros.
  __device__ void load(Piece<Storage, kPiece> (&pieces)[kPieces]) const {
    if (direct) return copy(tensor + first, pieces);
#pragma unroll 1
    for (int i = lane(); i < kNumbers; i += kLanes) buffer[i] = first + i < size ? tensor[first + i] : Storage(0);
    __syncwarp();
    copy(buffer, pieces);
    __syncwarp();
  }

  __device__ void store(const Piece<Storage, kPiece> (&pieces)[kPieces]) const {
    if (direct) return copy(pieces, tensor + first);
    copy(pieces, buffer);
    __syncwarp();
#pragma unroll 1
    for (int i = lane(); i < kNumbers && first + i < size; i += kLanes) tensor[first + i] = buffer[i];
    __syncwarp();
  }

 private:
  static __device__ void copy(const Storage* source, Piece<Storage, kPiece> (&pieces)[kPieces]) {
    const Words* mine = reinterpret_cast<const Words*>(source) + lane();
    PROXSPARSE_UNROLL
    for (int p = 0; p < kPieces; ++p) pieces[p].words = mine[p * kLanes];
  }
  static __device__ void copy(const Piece<Storage, kPiece> (&pieces)[kPieces], Storage* target) {
    Words* mine = reinterpret_cast<Words*>(target) + lane();
    PROXSPARSE_UNROLL
    for (int p = 0; p < kPieces; ++p) mine[p * kLanes] = pieces[p].words;
  }
};

// The numbers that a warp takes of each of several tensors, one piece in each lane.
struct WarpRange {
  int64_t first, size;
  void* buffer;  // in shared memory, for one tensor
  bool direct;   // every tensor is aligned and contains the whole range: the buffer is not needed
};

template <typename Storage, int kPiece>
__device__ void load_piece(const Storage* tensor, WarpRange range, Piece<Storage, kPiece>& numbers) {
  Piece<Storage, kPiece> piece[1];
  WarpTile<const Storage, 1, kPiece>(tensor, range.first, range.size, range.buffer, range.direct).load(piece);
  numbers = piece[0];
}

template <typename Storage, int kPiece>
__device__ void store_piece(const Piece<Storage, kPiece>& numbers, WarpRange range, Storage* tensor) {
  const Piece<Storage, kPiece> piece[1] = {numbers};
  WarpTile<Storage, 1, kPiece>(tensor, range.first, range.size, range.buffer, range.direct).store(piece);
}

// Starts the warps for `size` numbers.
template <typename Arguments>
cudaError_t launch_warps(void (*kernel)(Arguments), int64_t size, int numbers_per_warp, const Arguments& arguments,
                         cudaStream_t stream) {
  const int64_t numbers_per_block = int64_t{numbers_per_warp} * kWarps;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>((size + numbers_per_block - 1) / numbers_per_block));
  config.blockDim = dim3(kWarps * kLanes);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, arguments);
}

}  // namespace proxsparse::gpu
