// The operands of the tiles for products of codes of 8 bits on Hopper: sums of int8 in int32, of e4m3 in fp32.
#pragma once

#include "sm90.h"

namespace proxsparse::gemm {

// y = scale of a row of W * scale of a row of x * sum + bias, in fp32, rounded once; the operations of sm80_int8.h.
template <typename Code, typename SumOfCodes, typename Scale>
struct Codes {
  using Call = CodesCall;
  using Element = Code;
  using Sum = SumOfCodes;
  using Result = cutlass::bfloat16_t;
  static constexpr auto kRound = cutlass::FloatRoundStyle::round_to_nearest;

  template <typename Shape, typename T, bool kOptional>  // a number for each output feature; null means 0 if optional
  using OfOut = cutlass::epilogue::fusion::Sm90ColBroadcast<0, Shape, T, float, cute::Stride<cute::_1, cute::_0, int>,
                                                            16 / sizeof(T), kOptional>;
  template <typename Shape>
  using OfRows =
      cutlass::epilogue::fusion::Sm90RowBroadcast<0, Shape, float, float, cute::Stride<cute::_0, cute::_1, int>,
                                                  16 / sizeof(float), false>;
  template <template <typename> class Operation, typename Output>
  using Compute = cutlass::epilogue::fusion::Sm90Compute<Operation, Output, float, kRound>;
  template <typename... Nodes>
  using Tree = cutlass::epilogue::fusion::Sm90EVT<Nodes...>;

  template <typename Shape>
  using Scaled =
      Tree<Compute<cutlass::multiplies, float>, OfOut<Shape, Scale, false>, cutlass::epilogue::fusion::Sm90AccFetch>;
  template <typename Shape>
  using Product = Tree<Compute<cutlass::multiplies, float>, OfRows<Shape>, Scaled<Shape>>;
  template <typename Shape>
  using Fusion = Tree<Compute<cutlass::plus, Result>, OfOut<Shape, Result, true>, Product<Shape>>;

  template <typename Arguments>
  static void set(Arguments& fusion, const Call& call) {
    fusion = {{static_cast<const Result*>(call.bias)},
              {{call.x_scales}, {{static_cast<const Scale*>(call.scales)}, {}, {}}, {}},
              {}};
  }
};

using Int8 = Codes<int8_t, int32_t, cutlass::bfloat16_t>;
// CUTLASS adds the sums of the tensor cores, which have fewer than 24 bits, to sums in registers every 256 columns.
using Fp8 = Codes<cutlass::float_e4m3_t, float, float>;

}  // namespace proxsparse::gemm
