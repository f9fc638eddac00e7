// The loops of the CPU kernels, without torch: compiled once for each instruction set, chosen at run time.
#pragma once

#include <cstdint>

#include "../calls.h"
#include "../codes.h"

namespace proxsparse {

constexpr int kChunk = 256;  // blocks that are solved together: their data fits into the first-level cache
constexpr int64_t kChunkWeights = 4 * kChunk;

constexpr int64_t chunks(int64_t numel) { return (numel + kChunkWeights - 1) / kChunkWeights; }
constexpr int64_t rows(int64_t numel, int64_t in_features) { return numel == 0 ? 0 : numel / in_features; }
constexpr int64_t rows_per_task(int64_t weights, int64_t in_features) { return 1 + weights / (in_features + 1); }

struct MaskCall {
  const void* score;
  bool* mask;
  int64_t in_features;
  int m;
};

struct SparseLinearCall {
  const void* x;           // [rows, in_features], bfloat16 if that is the dtype and `Kernels` says so, else float32
  const void* values;      // [out_features, in_features / 2] numbers of the dtype or codes
  const uint8_t* indices;  // [out_features, ceil(in_features / 8)]
  const void* scales;      // of the dtype: [out_features] for kInt8, [out_features, ceil(in_features / 64)] for kInt4
  const void* bias;        // [out_features] of the dtype, or null
  void* y;                 // [rows, out_features] of the dtype
  int64_t rows, in_features, out_features;
};

constexpr int kTile = 4;  // output features that are computed together

// x [rows, units], in which a unit is 32 bits, in the order in which sparse_gemm reads it.
struct RowPanelsCall {
  const void* x;
  uint32_t* panels;  // [panels, units, panel_rows]
  int64_t rows, units;
};

constexpr int kDepth = 320;           // units of x that are multiplied by one group after the other: up to 40 KB
constexpr int kUnpackedUnits = 8192;  // of each of the 12 output features of a group: 384 KB, for the L2 cache
constexpr int kLargestBlock = 64;     // that unpack_features supports: the largest m of NMPattern
constexpr int kChunkUnits = 16;       // units of an output feature that are stored together, 64 bytes

struct SparseGemmCall {
  SparseLinearCall linear, rest;  // all rows, and the rows after the panels
  const uint32_t* x_panels;
  int64_t panels;
  int64_t units_together, groups_together;  // unpacked before they are multiplied: whole chunks in kUnpackedUnits
};

// Each serves the chunks, blocks, rows of the weight, panels of x, or tiles or groups of output features from begin to
// end; mask, masked_weight and prox serve rows if m > 4.
struct Kernels {
  void (*prox[kDtypes])(const ProxCall&, int64_t begin, int64_t end);
  void (*adamw_prox[kDtypes])(const AdamWProxCall&, int64_t begin, int64_t end);
  void (*adamw_prox_bfloat16_moments[kDtypes])(const AdamWProxCall&, int64_t begin, int64_t end);
  void (*mask[kDtypes])(const MaskCall&, int64_t begin, int64_t end);
  void (*masked_weight[kDtypes])(const MaskedWeightCall&, int64_t begin, int64_t end);
  void (*masked_weight_float32_bfloat16)(const MaskedWeightCall&, int64_t begin, int64_t end);
  void (*unpack_24[kDtypes])(const PackCall&, int64_t begin, int64_t end);
  void (*sparse_linear[kCodes][kDtypes])(const SparseLinearCall&, int64_t begin, int64_t end);
  void (*row_panels)(const RowPanelsCall&, int64_t begin, int64_t end);
  // The scratch has group_features * (kUnpackedUnits + groups * panels * panel_rows) units; groups is end - begin, or
  // groups_together if these are all units of a row.
  void (*sparse_gemm[kCodes][kDtypes])(const SparseGemmCall&, uint32_t* scratch, int64_t begin, int64_t end);
  // Only for reads_bfloat16: output features begin to end in dense form, [feature, in_features] bfloat16.
  // The packed columns are those of `in_features` columns in blocks of m.
  void (*unpack_features[kCodes])(const SparseLinearCall&, int64_t in_features, int m, int64_t begin, int64_t end,
                                  void* weight);
  int64_t panel_rows, group_features;  // rows of x in a panel, output features in a group
  bool reads_bfloat16;                 // x may be bfloat16 if the values are
};

extern const Kernels kDefaultKernels, kAvx2Kernels, kAvx512Kernels, kAvx512Bf16Kernels;

// The kernels for the widest vectors of this CPU, at most those named by the environment variable
// PROXSPARSE_CPU_CAPABILITY=default|avx2|avx512|avx512_bf16|amx.
const Kernels& kernels();
bool has_amx();  // whether torch's matmul of bfloat16 is several times as fast as `kernels()`

}  // namespace proxsparse
