// A tile for all GPUs since Ampere: mma.sp. It writes y^T, has no bias, and needs a multiple of 8 rows.
#pragma once

#include "cutlass/cutlass.h"
// SparseGemm needs cutlass.h first; this comment keeps clang-format from sorting it.
#include "cutlass/gemm/device/gemm_sparse.h"
#include "tile.h"

namespace proxsparse::gemm {

// A thread block computes kOut by kRows of y, each of its warps kWarpOut by kWarpRows.
template <int kOut, int kRows, int kWarpOut, int kWarpRows, int kStages>
struct Sm80 {
  static constexpr int kArchitecture = 80;
  using Element = cutlass::bfloat16_t;
  using RowMajor = cutlass::layout::RowMajor;
  using Gemm = cutlass::gemm::device::SparseGemm<
      Element, RowMajor, Element, cutlass::layout::ColumnMajor, Element, RowMajor, float,
      cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80, cutlass::gemm::GemmShape<kOut, kRows, 64>,
      cutlass::gemm::GemmShape<kWarpOut, kWarpRows, 64>, cutlass::gemm::GemmShape<16, 8, 32>,
      cutlass::epilogue::thread::LinearCombination<Element, 8, float, float>,
      cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<8>, kStages>;

  static typename Gemm::Arguments arguments(const Call& call) {
    const auto reordered = Gemm::LayoutE::packed({call.out_features, call.in_features / 16});
    auto* y = static_cast<Element*>(call.y);
    return {{call.out_features, call.rows, call.in_features},
            {static_cast<const Element*>(call.values), call.in_features / 2},
            {static_cast<const Element*>(call.x), call.in_features},
            {y, call.rows},
            {y, call.rows},
            {static_cast<typename Gemm::ElementE*>(const_cast<void*>(call.metadata)), reordered},
            {1.0f, 0.0f}};
  }
};

}  // namespace proxsparse::gemm
