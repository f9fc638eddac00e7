// A tile for products of codes of int8, on all GPUs since Ampere: mma.sp with sums in int32. It writes y^T and needs a
// multiple of 16 rows.
#pragma once

#include "cutlass/cutlass.h"
// SparseGemm needs cutlass.h first; this comment keeps clang-format from sorting it.
#include "cutlass/gemm/device/gemm_universal_adapter.h"
// The visitors need the adapter, which they do not include.
#include "cutlass/epilogue/threadblock/fusion/visitors.hpp"
#include "cutlass/gemm/device/gemm_sparse_with_visitor.h"
#include "tile.h"

namespace proxsparse::gemm {

// y^T = scale of a row of W * scale of a row of x * sum + bias, in fp32, rounded once. A thread block computes kOut by
// kRows of y, each of its warps kWarpOut by kWarpRows.
template <int kOut, int kRows, int kWarpOut, int kWarpRows, int kStages>
struct Sm80Int8 {
  using Call = CodesCall;
  static constexpr int kArchitecture = 80;
  using Element = cutlass::bfloat16_t;
  using RowMajor = cutlass::layout::RowMajor;
  using Shape = cutlass::gemm::GemmShape<kOut, kRows, 128>;
  using WarpShape = cutlass::gemm::GemmShape<kWarpOut, kWarpRows, 128>;
  static constexpr auto kRound = cutlass::FloatRoundStyle::round_to_nearest;
  static constexpr int kAligned = 8;  // numbers of y, 16 bytes

  using ThreadMap = cutlass::epilogue::threadblock::OutputTileThreadLayout<Shape, WarpShape, Element, kAligned, 1>;
  template <typename T>  // a number for each output feature
  using OfOut =
      cutlass::epilogue::threadblock::VisitorColBroadcast<ThreadMap, T, cute::Stride<cute::_1, cute::_0, int32_t>>;
  using OfRows =
      cutlass::epilogue::threadblock::VisitorRowBroadcast<ThreadMap, float, cute::Stride<cute::_0, cute::_1, int32_t>>;
  template <template <typename> class Operation, typename Result>
  using Compute = cutlass::epilogue::threadblock::VisitorCompute<Operation, Result, float, kRound>;
  template <typename... Nodes>
  using Tree = cutlass::epilogue::threadblock::Sm80EVT<Nodes...>;

  using Scaled =
      Tree<Compute<cutlass::multiplies, float>, OfOut<Element>, cutlass::epilogue::threadblock::VisitorAccFetch>;
  using Product = Tree<Compute<cutlass::multiplies, float>, OfRows, Scaled>;
  using Sum = Tree<Compute<cutlass::plus, Element>, OfOut<Element>, Product>;
  using Store = cutlass::epilogue::threadblock::VisitorAuxStore<ThreadMap, Element, kRound,
                                                                cute::Stride<int64_t, cute::_1, int64_t>>;
  using Epilogue = Tree<Store, Sum>;
  using Gemm = cutlass::gemm::device::SparseGemmWithVisitor<
      int8_t, RowMajor, int8_t, cutlass::layout::ColumnMajor, Element, RowMajor, int32_t,
      cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80, Shape, WarpShape, cutlass::gemm::GemmShape<16, 8, 64>,
      Epilogue, cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<8>, kStages, 16, 16,
      cutlass::arch::OpMultiplyAddSaturate>;

  static typename Gemm::Arguments arguments(const Call& call) {
    using ElementE = typename Gemm::ElementE;
    const auto reordered = Gemm::LayoutE::packed({call.out_features, call.in_features / 32});
    const typename OfOut<Element>::Arguments scales{static_cast<const Element*>(call.scales)};
    const typename OfOut<Element>::Arguments bias{static_cast<const Element*>(call.bias)};
    const typename OfRows::Arguments x_scales{call.x_scales};
    const typename Store::Arguments store{static_cast<Element*>(call.y), {int64_t{call.rows}, cute::_1{}, 0}};
    return {{call.out_features, call.rows, call.in_features},
            {static_cast<const int8_t*>(call.values), call.in_features / 2},
            {static_cast<const int8_t*>(call.x), call.in_features},
            {static_cast<ElementE*>(const_cast<void*>(call.metadata)), reordered},
            {{bias, {x_scales, {scales, {}, {}}, {}}, {}}, store}};
  }
};

}  // namespace proxsparse::gemm
