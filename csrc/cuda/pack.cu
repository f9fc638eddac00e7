// Dense 2:4 weights to the packed format of proxsparse/reference/pack.py and back, bit for bit. A thread processes the
// two blocks of one byte of places at a time.
#include <bit>

#include "../packed_places.h"
#include "launch.h"
#include "warp.h"

namespace proxsparse::gpu {
namespace {

constexpr int kBytesOfLane = 4;  // of places, which are loaded at the same time
constexpr int kBytesOfWarp = kBytesOfLane * kLanes;

template <typename Word, int kCount>
struct alignas(sizeof(Word) * kCount) Group {
  Word word[kCount];
};

// The two blocks of a byte of places; the last byte of a row may have only one.
struct BlockPair {
  int64_t first;  // index among the blocks of all rows
  bool has_second;

  __device__ BlockPair(int64_t byte, int blocks) {
    if (blocks % 2 == 0) {  // the byte's index is that of the pair
      first = 2 * byte, has_second = true;
    } else {
      const int bytes = (blocks + 1) / 2;
      const int64_t row = byte / bytes;
      first = row * blocks + 2 * (byte - row * bytes), has_second = byte - row * bytes + 1 < bytes;
    }
  }
};

template <typename Word>
struct PackArguments {
  Word* weight;
  Word* values;
  uint8_t* indices;
  int* infeasible;  // null: unpack
  int64_t bytes;    // of places, in all rows
  int blocks;       // in a row
};

// Calls visit(byte) for each byte of this thread.
template <typename Visit>
__device__ void each_byte(int64_t bytes, Visit visit) {
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kWarps + warp()) * kBytesOfWarp + lane();
  PROXSPARSE_UNROLL
  for (int i = 0; i < kBytesOfLane; ++i) {
    if (first + i * kLanes < bytes) visit(first + i * kLanes);
  }
}

// ------------------------------------------------------------------------- unpacking

__device__ inline Group<uint16_t, 4> unpacked(Group<uint16_t, 2> values, uint32_t places) {
  const uint64_t first = values.word[0], second = values.word[1];
  return std::bit_cast<Group<uint16_t, 4>>(first << 16 * (places & 3) | second << 16 * (places >> 2 & 3));
}

__device__ inline Group<uint32_t, 4> unpacked(Group<uint32_t, 2> values, uint32_t places) {
  Group<uint32_t, 4> block;
  PROXSPARSE_UNROLL
  for (uint32_t i = 0; i < 4; ++i) {
    block.word[i] = i == (places & 3) ? values.word[0] : i == (places >> 2 & 3) ? values.word[1] : 0;
  }
  return block;
}

template <typename Word>
__global__ void __launch_bounds__(kWarps* kLanes) unpack_kernel(PackArguments<Word> call) {
  each_byte(call.bytes, [&](int64_t byte) {
    const BlockPair blocks(byte, call.blocks);
    const auto* values = reinterpret_cast<const Group<Word, 2>*>(call.values) + blocks.first;
    auto* weight = reinterpret_cast<Group<Word, 4>*>(call.weight) + blocks.first;
    const uint32_t places = call.indices[byte];
    weight[0] = unpacked(values[0], places);
    if (blocks.has_second) weight[1] = unpacked(values[1], places >> 4);
  });
}

// ------------------------------------------------------------------------- packing

// kept_places of a block, as a nibble.
template <typename Word>
__device__ uint32_t places_of(const Group<Word, 4>& block, bool& infeasible) {
  uint32_t nonzero = 0, negative_zero = 0;
  PROXSPARSE_UNROLL
  for (int i = 0; i < 4; ++i) {
    const Word magnitude = static_cast<Word>(block.word[i] << 1);
    nonzero |= uint32_t{magnitude != 0} << i;
    negative_zero |= uint32_t{magnitude == 0 && block.word[i] != 0} << i;
  }
  infeasible |= __popc(nonzero) > 2;
  return kept_places(nonzero, negative_zero);
}

template <typename Word>
__device__ Group<Word, 2> packed(const Group<Word, 4>& block, uint32_t places) {
  Group<Word, 2> values{block.word[0], block.word[3]};
  PROXSPARSE_UNROLL
  for (uint32_t i = 1; i < 4; ++i) {
    if (i == (places & 3)) values.word[0] = block.word[i];
    if (4 - i - 1 == places >> 2) values.word[1] = block.word[4 - i - 1];
  }
  return values;
}

template <typename Word>
__global__ void __launch_bounds__(kWarps* kLanes) pack_kernel(PackArguments<Word> call) {
  bool infeasible = false;
  each_byte(call.bytes, [&](int64_t byte) {
    const BlockPair blocks(byte, call.blocks);
    const auto* weight = reinterpret_cast<const Group<Word, 4>*>(call.weight) + blocks.first;
    auto* values = reinterpret_cast<Group<Word, 2>*>(call.values) + blocks.first;
    const uint32_t low = places_of(weight[0], infeasible);
    values[0] = packed(weight[0], low);
    uint32_t high = 0;
    if (blocks.has_second) {
      high = places_of(weight[1], infeasible);
      values[1] = packed(weight[1], high);
    }
    call.indices[byte] = static_cast<uint8_t>(low | high << 4);
  });
  if (infeasible) *call.infeasible = 1;
}

template <typename Word>
cudaError_t launch(const PackCall& call, int* infeasible, cudaStream_t stream) {
  const int blocks = static_cast<int>(call.in_features / 4);
  const PackArguments<Word> arguments{static_cast<Word*>(call.weight),
                                      static_cast<Word*>(call.values),
                                      call.indices,
                                      infeasible,
                                      call.rows * ((blocks + 1) / 2),
                                      blocks};
  return launch_warps(infeasible ? pack_kernel<Word> : unpack_kernel<Word>, arguments.bytes, kBytesOfWarp, arguments,
                      stream);
}

}  // namespace

cudaError_t launch_pack(const PackCall& call, int bytes_of_weight, int* infeasible, cudaStream_t stream) {
  return bytes_of_weight == 2 ? launch<uint16_t>(call, infeasible, stream) : launch<uint32_t>(call, infeasible, stream);
}

cudaError_t launch_unpack(const PackCall& call, int bytes_of_weight, cudaStream_t stream) {
  return launch_pack(call, bytes_of_weight, nullptr, stream);
}

}  // namespace proxsparse::gpu
