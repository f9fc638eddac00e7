// What csrc/cuda/sparse_mma.h says in PTX, for the emulated GPU of cuda_runtime.h. Written after the PTX ISA alone:
// "mma.sp", matrix fragments of m16n8k32 with .f16 and .bf16, and its metadata.
#pragma once

namespace proxsparse::gpu {

struct Words4;

// D [16, 8] += A [16, 32] B [32, 8]. With g = lane / 4 and q = lane % 4 of a warp,
//   A: registers 0 and 2 belong to row g, 1 and 3 to row g + 8; registers 0 and 1 hold the two stored elements of
//      columns 4 q to 4 q + 3, registers 2 and 3 those of columns 4 q + 16 to 4 q + 19
//   B: register t holds rows 2 q + 8 t and 2 q + 8 t + 1 of column g
//   D: registers 0 and 1 are columns 2 q and 2 q + 1 of row g, registers 2 and 3 of row g + 8
//   metadata: of the lanes that the selector names, 0 and 1 or 2 and 3 of every four, the first describes columns 0 to
//   15
//      and the second columns 16 to 31: in bits 0 to 15 of row g, in bits 16 to 31 of row g + 8; four bits for each
//      four columns, two for the place of each stored element, which must ascend (else the result is undefined: NaN)
template <int kSelector, typename Format>
void mma_sp(Format, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[4], uint32_t places) {
  const emulated::Collective all(kSelector ? "mma_sp 1" : "mma_sp 0",
                                 {a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3], places});
  const auto number = [](uint32_t word, int half) { return Format::load(static_cast<uint16_t>(word >> 16 * half)); };
  const int lane = static_cast<int>(threadIdx.x) % emulated::kLanes, group = lane / 4 * 4;
  for (int i = 0; i < 4; ++i) {
    const int half = i / 2, column = lane % 4 * 2 + i % 2;  // row g, row g + 8
    for (int block = 0; block < 8; ++block) {
      const uint32_t stored = all.offered(group + block % 4)[half + block / 4 * 2];
      const uint32_t metadata = all.offered(group + 2 * kSelector + block / 4)[8];
      const uint32_t bits = metadata >> (16 * half + block % 4 * 4);
      if ((bits & 3) >= (bits >> 2 & 3)) d[i] = std::numeric_limits<float>::quiet_NaN();
      for (int element = 0; element < 2; ++element) {
        const int k = 4 * block + static_cast<int>(bits >> 2 * element & 3);
        d[i] += number(stored, element) * number(all.offered(4 * column + k % 8 / 2)[4 + k / 8], k % 2);
      }
    }
  }
}

// Numbers 2 (lane % 4) and 2 (lane % 4) + 1 of row lane / 4 of four matrices; lane 8 t + r brings row r of matrix t.
template <typename Words = Words4>  // which sparse_mma.h defines
Words load_matrices(const uint32_t* row) {
  const auto address = reinterpret_cast<uintptr_t>(row);
  const emulated::Collective all("load_matrices", {uint32_t(address), uint32_t(address >> 32)});
  const int lane = static_cast<int>(threadIdx.x) % emulated::kLanes;
  Words got;
  for (int t = 0; t < 4; ++t) {
    const uint32_t* offered = all.offered(8 * t + lane / 4);
    const auto place = uintptr_t{offered[0]} | uintptr_t{offered[1]} << 32;
    if (place % 16) std::abort();
    got.word[t] = reinterpret_cast<const uint32_t*>(place)[lane % 4];
  }
  return got;
}

// The copy happens as late as it may: where this thread waits for it. Until then there are NaNs: it may be that early.
inline void copy_8_bytes(uint32_t* shared, const uint16_t* global, bool exists) {
  if (reinterpret_cast<uintptr_t>(shared) % 8 || reinterpret_cast<uintptr_t>(global) % 8) std::abort();
  if (!emulated::cluster.thread->previous_ended) std::abort();
  std::memset(shared, 0xff, 8);
  emulated::cluster.thread->copies.push_back({shared, exists ? global : nullptr, 8});
}
inline void wait_for_copies() {
  for (const auto& copy : emulated::cluster.thread->copies) {
    if (copy.source)
      std::memcpy(copy.target, copy.source, copy.bytes);
    else
      std::memset(copy.target, 0, copy.bytes);
  }
  emulated::cluster.thread->copies.clear();
}

template <int kWarps>
void sync_warps(int group) {
  static constexpr const char* names[] = {"barrier 0", "barrier 1", "barrier 2", "barrier 3",
                                          "barrier 4", "barrier 5", "barrier 6", "barrier 7"};
  if (kWarps == 1) return __syncwarp();
  emulated::cluster.thread->expected = kWarps * emulated::kLanes;
  emulated::Collective(group < 8 ? names[group] : nullptr);
}

inline void allow_next_kernel() {}
inline void wait_for_previous_kernel() { emulated::cluster.thread->previous_ended = true; }
inline char* dynamic_shared() { return emulated::cluster.block->shared.data(); }
inline void cluster_sync() { emulated::Collective("cluster_sync"); }
inline void cluster_arrive_wait() { emulated::Collective("cluster_sync"); }
inline float load_from_block(const float* shared, int rank) {  // of a cluster along y
  const auto offset = reinterpret_cast<const char*>(shared) - dynamic_shared();
  return *reinterpret_cast<const float*>(emulated::cluster.blocks[rank].shared.data() + offset);
}

}  // namespace proxsparse::gpu
