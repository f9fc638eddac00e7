// Defines one table of kernels. The including file has chosen the instruction set, and includes this header last.
#pragma once

#include "adamw_prox_chunks.h"
#include "mask_blocks.h"
#include "prox_chunks.h"
#include "sparse_gemm.h"
#include "sparse_linear_tiles.h"
#include "unpack_rows.h"

namespace proxsparse {
inline namespace PROXSPARSE_ISA {

constexpr Kernels kKernels = {
    {prox_chunks<Float32>, prox_chunks<Float64>, prox_chunks<BFloat16>, prox_chunks<Float16>},
    {adamw_prox_chunks<Float32, Float32>, adamw_prox_chunks<Float64, Float64>, adamw_prox_chunks<BFloat16, Float32>,
     adamw_prox_chunks<Float16, Float32>},
    {adamw_prox_chunks<Float32, BFloat16>, nullptr, adamw_prox_chunks<BFloat16, BFloat16>,
     adamw_prox_chunks<Float16, BFloat16>},
    {mask_blocks<Float32>, mask_blocks<Float64>, mask_blocks<BFloat16>, mask_blocks<Float16>},
    {masked_weight_chunks<Float32, Float32>, masked_weight_chunks<Float64, Float64>,
     masked_weight_chunks<BFloat16, BFloat16>, masked_weight_chunks<Float16, Float16>},
    masked_weight_chunks<Float32, BFloat16>,
    {unpack_24_rows<uint32_t>, unpack_24_rows<uint64_t>, unpack_24_rows<uint16_t>, unpack_24_rows<uint16_t>},
    {{sparse_linear_tiles<Float32, kPlain>, nullptr, sparse_linear_tiles<BFloat16, kPlain>, nullptr},
     {sparse_linear_tiles<Float32, kInt8>, nullptr, sparse_linear_tiles<BFloat16, kInt8>, nullptr},
     {sparse_linear_tiles<Float32, kInt4>, nullptr, sparse_linear_tiles<BFloat16, kInt4>, nullptr}},
    row_panels,
    {{sparse_gemm_groups<Float32, kPlain>, nullptr, sparse_gemm_groups<BFloat16, kPlain>, nullptr},
     {sparse_gemm_groups<Float32, kInt8>, nullptr, sparse_gemm_groups<BFloat16, kInt8>, nullptr},
     {sparse_gemm_groups<Float32, kInt4>, nullptr, sparse_gemm_groups<BFloat16, kInt4>, nullptr}},
#ifdef PROXSPARSE_BF16
    {unpack_features<kPlain>, unpack_features<kInt8>, unpack_features<kInt4>},
#else
    {},
#endif
    kPanelRows,
    kGroupFeatures,
    kReadsBFloat16,
};

}  // namespace PROXSPARSE_ISA
}  // namespace proxsparse
