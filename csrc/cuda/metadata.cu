// The places of a packed weight (proxsparse/reference/pack.py) in the order of CUTLASS's matrix E. As in csrc/cutlass,
// W is A [M, K], M = out_features; a row of indices has K / 8 bytes.
#include "launch.h"
#include "sparse_mma.h"
#include "warp.h"

namespace proxsparse::gpu {
namespace {

// Two bytes of each of two words: the lower two of both, or the upper two.
__device__ inline uint32_t halves(uint32_t first, uint32_t second, bool upper) {
  return __byte_perm(first, second, upper ? 0x7632 : 0x5410);
}

// sm_80. E is uint16; each number describes 16 columns. 32 rows by 32 columns are 128 consecutive bytes, 16 for each
// g < 8: (row g, first half), (g + 8, first), (g, second), (g + 8, second), then the same for rows g + 16 and g + 24.
// All groups of rows come before the next 32 columns.
__global__ void __launch_bounds__(kWarps* kLanes) metadata_sm80_kernel(MetadataCall call) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kWarps + warp()) * kLanes + lane();
  const int64_t groups = call.out_features / 4;  // of 4 rows; neighbouring lanes write to neighbouring addresses
  const int64_t group = i % groups, columns = i / groups;
  if (columns >= call.in_features / 64) return;
  const int bytes = call.in_features / 8;
  Words2 row[4];
  PROXSPARSE_UNROLL
  for (int r = 0; r < 4; ++r) {
    const int64_t place = (group / 8 * 32 + group % 8 + 8 * r) * bytes + columns * 8;
    row[r] = *reinterpret_cast<const Words2*>(call.indices + place);
  }
  PROXSPARSE_UNROLL
  for (int half = 0; half < 2; ++half) {
    const uint32_t a = row[0].word[half], b = row[1].word[half], c = row[2].word[half], d = row[3].word[half];
    reinterpret_cast<Words4*>(call.metadata)[(2 * columns + half) * groups + group] = {
        halves(a, b, false), halves(a, b, true), halves(c, d, false), halves(c, d, true)};
  }
}

// 16 bytes of a row, 128 columns.
__device__ Words4 load_row(const MetadataCall& call, int64_t row, int64_t first) {
  Words4 words = {kAnyPlaces, kAnyPlaces, kAnyPlaces, kAnyPlaces};
  if (row >= call.out_features) return words;
  const int bytes = call.in_features / 8;
  const uint8_t* place = call.indices + row * bytes + first;
  if (bytes % 16 == 0) return *reinterpret_cast<const Words4*>(place);
  PROXSPARSE_UNROLL
  for (int i = 0; i < 16; ++i) {
    if (first + i < bytes)
      words.word[i / 4] = (words.word[i / 4] & ~(0xffu << i % 4 * 8)) | uint32_t{place[i]} << i % 4 * 8;
  }
  return words;
}

// sm_90. Padded to multiples of 64 rows and 128 columns; 64 by 128 are 1024 consecutive bytes, and all rows come before
// the next 128 columns. The dimensions of the 1024 bytes, slowest first: 4 groups of 16 rows, 2 halves of 32 columns, 8
// rows, 4 groups of 32 columns, rows r and r + 8, 2 bytes.
__global__ void __launch_bounds__(kWarps* kLanes) metadata_sm90_kernel(MetadataCall call) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kWarps + warp()) * kLanes + lane();
  const int64_t pairs = (call.out_features + 63) / 64 * 32;  // of rows r and r + 8
  const int64_t pair = i % pairs, columns = i / pairs;
  if (columns * 128 >= call.in_features) return;
  const int64_t row = pair / 8 * 16 + pair % 8;
  const Words4 a = load_row(call, row, columns * 16), b = load_row(call, row + 8, columns * 16);
  PROXSPARSE_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int64_t place = columns * pairs * 2 + pair / 8 * 16 + half * 8 + pair % 8;
    reinterpret_cast<Words4*>(call.metadata)[place] = {
        halves(a.word[0], b.word[0], half), halves(a.word[1], b.word[1], half), halves(a.word[2], b.word[2], half),
        halves(a.word[3], b.word[3], half)};
  }
}

}  // namespace

cudaError_t launch_metadata(const MetadataCall& call, cudaStream_t stream) {
  if (call.architecture == 80) {
    const int64_t threads = int64_t{call.out_features} / 4 * (call.in_features / 64);
    return launch_warps(metadata_sm80_kernel, threads, kLanes, call, stream);
  }
  const int64_t threads = (int64_t{call.out_features} + 63) / 64 * 32 * ((call.in_features + 127) / 128);
  return launch_warps(metadata_sm90_kernel, threads, kLanes, call, stream);
}

}  // namespace proxsparse::gpu
