// 2:4 weights to the packed format and back on the CPU: packing without vector code, because a weight is packed once
// (unpack_rows.h unpacks it), checks and threads.
#include <ATen/Parallel.h>

#include <atomic>
#include <bit>

#include "../ops.h"
#include "../packed_places.h"
#include "kernels.h"

namespace proxsparse {
namespace {

// About 10 us of work: a few times the cost of waking a thread.
constexpr int64_t kPackedPerTask = 1 << 14, kUnpackedPerTask = 1 << 17;

// f(begin, end) for the rows of the weight, on all threads.
template <typename F>
void parallel_rows(const PackCall& call, int64_t weights_per_task, F f) {
  at::parallel_for(0, call.rows, weights_per_task / (call.in_features + 1) + 1, f);
}

constexpr uint8_t kInfeasible = 0xff;

// kept_places of a block whose nonzeros are the low nibble and whose -0.0 are the high nibble; kInfeasible if it has
// more than two nonzeros.
struct PlacesOfBlock {
  uint8_t of[256];
};
constexpr PlacesOfBlock kPlacesOfBlock = [] {
  PlacesOfBlock places{};
  for (uint32_t block = 0; block < 256; ++block) {
    const uint32_t nonzero = block & 15, negative_zero = block >> 4;
    places.of[block] = std::popcount(nonzero) > 2 ? kInfeasible : kept_places(nonzero, negative_zero & ~nonzero);
  }
  return places;
}();

// Rows `begin` to `end`; false if a block has more than two nonzeros. The numbers are bit patterns.
template <typename Storage>
bool pack_rows(const PackCall& call, int64_t begin, int64_t end) {
  constexpr Storage kNegativeZero = Storage(Storage{1} << (8 * sizeof(Storage) - 1));
  const int64_t blocks = call.in_features / 4, row_bytes = (blocks + 1) / 2;
  bool feasible = true;
  for (int64_t row = begin; row < end; ++row) {
    const auto* weight = static_cast<const Storage*>(call.weight) + row * 4 * blocks;
    auto* values = static_cast<Storage*>(call.values) + row * 2 * blocks;
    uint8_t* indices = call.indices + row * row_bytes;
    for (int64_t block = 0; block < blocks; ++block, weight += 4, values += 2) {
      unsigned kinds = 0;
      for (int i = 0; i < 4; ++i) {
        kinds |= unsigned{Storage(weight[i] << 1) != 0} << i | unsigned{weight[i] == kNegativeZero} << (4 + i);
      }
      const unsigned places = kPlacesOfBlock.of[kinds];
      feasible &= places != kInfeasible;
      values[0] = weight[places & 3];
      values[1] = weight[places >> 2 & 3];
      indices[block / 2] = block % 2 == 0 ? places & 15 : indices[block / 2] | (places & 15) << 4;
    }
  }
  return feasible;
}

}  // namespace

bool pack_24(const at::Tensor& weight, const at::Tensor& values, const at::Tensor& indices) {
  const PackCall call = checked_pack(at::kCPU, weight, values, indices);
  const Dtype dtype = dtype_of(weight, "weight");
  const auto pack = dtype == kFloat64   ? pack_rows<uint64_t>
                    : dtype == kFloat32 ? pack_rows<uint32_t>
                                        : pack_rows<uint16_t>;
  std::atomic<bool> feasible{true};
  parallel_rows(call, kPackedPerTask, [&](int64_t begin, int64_t end) {
    if (!pack(call, begin, end)) feasible = false;
  });
  return feasible;
}

void unpack_24(const at::Tensor& values, const at::Tensor& indices, const at::Tensor& weight) {
  const PackCall call = checked_pack(at::kCPU, weight, values, indices);
  const auto unpack = kernels().unpack_24[dtype_of(weight, "weight")];
  parallel_rows(call, kUnpackedPerTask, [&](int64_t begin, int64_t end) { unpack(call, begin, end); });
}

}  // namespace proxsparse
