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

// Schedule is that of the main loop, EpilogueSchedule that of writing y. All tiles with 128 columns read the same
// metadata.
template <int kOut, int kRows, int kCluster, typename Schedule, typename EpilogueSchedule>
struct Sm90 {
  static constexpr int kArchitecture = 90;
  using Element = cutlass::bfloat16_t;
  using Shape = cute::Shape<cute::Int<kOut>, cute::Int<kRows>, cute::_128>;
  using Cluster = cute::Shape<cute::Int<kCluster>, cute::_1, cute::_1>;
  using RowMajor = cutlass::layout::RowMajor;
  using ColumnMajor = cutlass::layout::ColumnMajor;
  static constexpr int kAligned = 16 / sizeof(Element);  // numbers in 16 bytes

  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassSparseTensorOp, Shape, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, ColumnMajor, kAligned, Element, ColumnMajor,
      kAligned, EpilogueSchedule, cutlass::epilogue::fusion::LinCombPerRowBias<Element, float, Element>>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassSparseTensorOp, Element, RowMajor, kAligned, Element, ColumnMajor,
      kAligned, float, Shape, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
      Schedule>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue>;
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
         static_cast<Element*>(call.y),
         cutlass::make_cute_packed_stride(typename Kernel::StrideD{}, y_shape)}};
    auto& fusion = arguments.epilogue.thread;
    fusion.alpha = 1;
    fusion.beta = 0;
    fusion.bias_ptr = static_cast<const Element*>(call.bias);
    cudaGetDevice(&arguments.hw_info.device_id);  // whose multiprocessors CUTLASS counts; otherwise those of device 0
    return arguments;
  }
};

}  // namespace proxsparse::gemm
