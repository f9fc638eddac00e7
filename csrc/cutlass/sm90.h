// A tile for Hopper: sparse wgmma with the tensor memory accelerator; only for sm_90a.
#pragma once

#include "cutlass/cutlass.h"
// The collectives need cutlass.h first; this comment keeps clang-format from sorting it.
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/util/packed_stride.hpp"
#include "tile.h"

namespace proxsparse::gemm {

// y = x W^T + bias. As all Operands, it says what is multiplied (Element), in what type the products are added (Sum),
// and how y is made of the sums (Fusion).
struct Bf16 {
  using Call = gemm::Call;
  using Element = cutlass::bfloat16_t;
  using Sum = float;
  template <typename Shape>
  using Fusion = cutlass::epilogue::fusion::LinCombPerRowBias<Element, float, Element>;

  template <typename Arguments>
  static void set(Arguments& fusion, const Call& call) {
    fusion.alpha = 1;
    fusion.beta = 0;
    fusion.bias_ptr = static_cast<const Element*>(call.bias);
  }
};

// Schedule is that of the main loop, EpilogueSchedule that of writing y. With TileScheduler = void, one thread block
// computes each tile of y. All tiles with 128 columns and Elements of one size read the same metadata.
template <typename Operands, int kOut, int kRows, int kCluster, typename Schedule, typename EpilogueSchedule,
          typename TileScheduler = void>
struct Sm90 {
  using Call = typename Operands::Call;
  static constexpr int kArchitecture = 90;
  using Element = typename Operands::Element;
  using Result = cutlass::bfloat16_t;
  using Shape = cute::Shape<cute::Int<kOut>, cute::Int<kRows>, cute::_128>;
  using Cluster = cute::Shape<cute::Int<kCluster>, cute::_1, cute::_1>;
  using RowMajor = cutlass::layout::RowMajor;
  using ColumnMajor = cutlass::layout::ColumnMajor;
  template <typename T>
  static constexpr int kAligned = 16 / sizeof(T);  // numbers in 16 bytes

  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassSparseTensorOp, Shape, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, typename Operands::Sum, float, void, ColumnMajor,
      kAligned<Result>, Result, ColumnMajor, kAligned<Result>, EpilogueSchedule,
      typename Operands::template Fusion<Shape>>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassSparseTensorOp, Element, RowMajor, kAligned<Element>, Element,
      ColumnMajor, kAligned<Element>, typename Operands::Sum, Shape, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
      Schedule>::CollectiveOp;
  using Kernel =
      cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue, TileScheduler>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
  using Config = typename Mainloop::SparseConfig;

  static typename Gemm::Arguments arguments(const Call& call) {
    const auto problem = cute::make_shape(call.out_features, call.rows, call.in_features, 1);
    const auto x_shape = cute::make_shape(call.rows, call.in_features, 1);
    const auto y_shape = cute::make_shape(call.out_features, call.rows, 1);
    typename Gemm::Arguments arguments{
        cutlass::gemm::GemmUniversalMode::kGemm,
        problem,
        {static_cast<const Element*>(call.values), Config::fill_layoutA(problem), static_cast<const Element*>(call.x),
         cutlass::make_cute_packed_stride(typename Kernel::StrideB{}, x_shape),
         static_cast<const typename Mainloop::ElementE*>(call.metadata), Config::fill_layoutE(problem)},
        {{},
         nullptr,
         {},
         static_cast<Result*>(call.y),
         cutlass::make_cute_packed_stride(typename Kernel::StrideD{}, y_shape)}};
    Operands::set(arguments.epilogue.thread, call);
    cudaGetDevice(&arguments.hw_info.device_id);  // whose multiprocessors CUTLASS counts; otherwise those of device 0
    return arguments;
  }
};

}  // namespace proxsparse::gemm
