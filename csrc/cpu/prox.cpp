// The prox of 2:4 and 1:4 blocks on the CPU: chunks of blocks are transposed into lanes, one vector lane a block.
#include <ATen/Parallel.h>

#include <algorithm>
#include <limits>

#include "../ops.h"
#include "../prox24_block.h"
#include "formats.h"
#include "vectorised.h"

namespace proxsparse {
namespace {

constexpr int kChunk = 64;              // blocks: four AVX-512 vectors of float32 hide the latency of a sweep
constexpr int64_t kChunksPerTask = 64;  // 10 to 60 us of work, a few times what it costs to wake a thread

// x[i][b] belongs to position i of block b.
template <typename T>
struct Lanes {
  alignas(64) T x[4][kChunk];

  PROXSPARSE_INLINE Block<T> block(int b) const { return {x[0][b], x[1][b], x[2][b], x[3][b]}; }
  PROXSPARSE_INLINE void set_block(int b, Block<T> w) {
    x[0][b] = w.w1;
    x[1][b] = w.w2;
    x[2][b] = w.w3;
    x[3][b] = w.w4;
  }
};

// |w| of kChunk contiguous blocks into lanes.
template <typename Format, typename T = typename Format::Arithmetic>
PROXSPARSE_INLINE void load_magnitudes(const typename Format::Storage* weight, Lanes<T>& z) {
#pragma GCC ivdep
  for (int b = 0; b < kChunk; ++b) {
    for (int i = 0; i < 4; ++i) z.x[i][b] = std::abs(Format::load(weight[4 * b + i]));
  }
}

// Blocks with a NaN or an infinity become zeros, which every solver leaves as they are.
template <typename T>
PROXSPARSE_INLINE void clear_unless_finite(Lanes<T>& z) {
#pragma GCC ivdep
  for (int b = 0; b < kChunk; ++b) {
    const T nan_unless_finite = z.x[0][b] * 0 + z.x[1][b] * 0 + z.x[2][b] * 0 + z.x[3][b] * 0;
    for (int i = 0; i < 4; ++i) z.x[i][b] = select(nan_unless_finite == 0, z.x[i][b], T(0));
  }
}

// z <- c * z, elementwise.
template <typename T>
PROXSPARSE_INLINE void multiply(Lanes<T>& z, const Lanes<T>& c) {
  for (int i = 0; i < 4; ++i) {
    for (int b = 0; b < kChunk; ++b) z.x[i][b] *= c.x[i][b];
  }
}

// w / c, elementwise.
template <typename T>
PROXSPARSE_INLINE void divide(const Lanes<T>& w, const Lanes<T>& c, Lanes<T>& quotient) {
  for (int i = 0; i < 4; ++i) {
    for (int b = 0; b < kChunk; ++b) quotient.x[i][b] = w.x[i][b] / c.x[i][b];
  }
}

// The new magnitudes with the signs of the old weights; where the prox w left z as it was, the old weight stays.
template <typename Format, typename T = typename Format::Arithmetic>
PROXSPARSE_INLINE void store_weights(const Lanes<T>& z, const Lanes<T>& w, const Lanes<T>& magnitude,
                                     typename Format::Storage* weight) {
  using Storage = typename Format::Storage;
#pragma GCC ivdep
  for (int b = 0; b < kChunk; ++b) {
    for (int i = 0; i < 4; ++i) {
      const Storage old = weight[4 * b + i];
      const Storage fresh = Format::store(std::copysign(magnitude.x[i][b], Format::load(old)));
      weight[4 * b + i] = select(w.x[i][b] == z.x[i][b], old, fresh);
    }
  }
}

template <typename T>
struct Range {
  T smallest, largest;  // over the blocks of a chunk, of their largest magnitude
};

template <typename T>
PROXSPARSE_INLINE Range<T> range_of_maxima(const Lanes<T>& z) {
  T smallest = std::numeric_limits<T>::max(), largest = 0;
#pragma omp simd reduction(min : smallest) reduction(max : largest)
  for (int b = 0; b < kChunk; ++b) {
    const T maximum = larger(larger(z.x[0][b], z.x[1][b]), larger(z.x[2][b], z.x[3][b]));
    smallest = smaller(smallest, maximum);
    largest = larger(largest, maximum);
  }
  return {smallest, largest};
}

// Up to lambda * z1 = 0.16 the objective is strictly convex on 0 <= w <= z: off the diagonal, the row sums of its
// Hessian stay below 6 * 0.16 < 1. Coordinate descent from z then finds the one minimum, of any support, unsorted.
constexpr double kConvexUpTo = 0.16;

// Sweeps after which rounding is all that is left of the error, on two million random blocks with and without ties.
template <typename T>
PROXSPARSE_INLINE int sweeps_needed(T largest_u) {
  constexpr T reach[] = {T(0.001), T(0.01), T(0.03), T(0.1)};
  constexpr int sweeps[] = {3, 5, 6, 9, 12};
  int row = 0;
  while (row < 4 && largest_u > reach[row]) ++row;
  return sizeof(T) == 8 ? 2 * sweeps[row] : sweeps[row];
}

template <typename T>
PROXSPARSE_INLINE void descend(const Lanes<T>& z, T lambda, int sweeps, Lanes<T>& w) {
  w = z;
  for (int sweep = 0; sweep < sweeps; ++sweep) {
#pragma GCC ivdep
    for (int b = 0; b < kChunk; ++b) w.set_block(b, sweep_24(z.block(b), lambda, w.block(b)));
  }
}

// The kept largest magnitudes, zeros elsewhere.
template <typename T>
PROXSPARSE_INLINE void keep_largest(const Lanes<T>& z, int kept, Lanes<T>& w) {
  const T first_dropped = T(kept) - T(0.5);
#pragma GCC ivdep
  for (int b = 0; b < kChunk; ++b) {
    const Block<T> m = z.block(b);
    const Ranks<T> rank = rank_descending(m);
    w.set_block(b, {select(rank.r1 < first_dropped, m.w1, T(0)), select(rank.r2 < first_dropped, m.w2, T(0)),
                    select(rank.r3 < first_dropped, m.w3, T(0)), select(rank.r4 < first_dropped, m.w4, T(0))});
  }
}

// Sorts each block, solves it, and puts the result back in the order of the weights.
template <typename T, typename Solve>
PROXSPARSE_INLINE void solve_sorted(const Lanes<T>& z, Lanes<T>& w, Solve solve) {
#pragma GCC ivdep
  for (int b = 0; b < kChunk; ++b) {
    const Block<T> m = z.block(b);
    const Ranks<T> rank = rank_descending(m);
    const Block<T> sorted = solve(sort_descending(m));
    w.set_block(
        b, {at_rank(sorted, rank.r1), at_rank(sorted, rank.r2), at_rank(sorted, rank.r3), at_rank(sorted, rank.r4)});
  }
}

// lambda and what the solvers need of it.
template <typename T>
struct Strength {
  T lambda, inverse;
  T gain;  // 1 / (1 - lambda), for 1:4; 0 from lambda = 1 on, where the largest weight of a block stays alone
};

// Clamped so that neither lambda nor its inverse is infinite in T; the gain in double, because in T lambda may be 1.
template <typename T>
Strength<T> strength(double reg_lambda) {
  const T lambda = static_cast<T>(
      std::clamp(reg_lambda, double{std::numeric_limits<T>::min()}, double{std::numeric_limits<T>::max()}));
  return {lambda, 1 / lambda, static_cast<T>(reg_lambda < 1 ? 1 / (1 - reg_lambda) : 0)};
}

template <typename T>
PROXSPARSE_INLINE void solve_chunk(const Lanes<T>& z, Strength<T> strength, int64_t n, Lanes<T>& w) {
  const T lambda = strength.lambda, inverse_lambda = strength.inverse, gain = strength.gain;
  if (n == 1) {
    if (gain == 0) return keep_largest(z, 1, w);
    return solve_sorted(z, w,
                        [=](Block<T> sorted) __attribute__((always_inline)) { return solve_14(sorted, lambda, gain); });
  }
  const Range<T> maxima = range_of_maxima(z);
  if (lambda * maxima.smallest >= kTwoSparseFrom<T>) return keep_largest(z, 2, w);
  if (lambda * maxima.largest <= T(kConvexUpTo)) return descend(z, lambda, sweeps_needed(lambda * maxima.largest), w);
  solve_sorted(
      z, w, [=](Block<T> sorted) __attribute__((always_inline)) { return solve_24(sorted, lambda, inverse_lambda); });
}

// One call: `blocks` contiguous blocks in rows of `in_features` weights; scale is the metric of a row, or null.
template <typename Format>
struct Task {
  typename Format::Storage* weight;
  int64_t blocks, in_features;
  const typename Format::Arithmetic* scale;
  Strength<typename Format::Arithmetic> strength;
  int64_t n;
};

// The metric of kChunk blocks from the weight number `start` on; a chunk may span several rows.
template <typename T>
PROXSPARSE_INLINE void load_scale(const T* scale, int64_t in_features, int64_t start, Lanes<T>& metric) {
  T row[4 * kChunk];
  int64_t column = start % in_features;
  for (int64_t filled = 0; filled < 4 * kChunk; column = 0) {
    const int64_t piece = std::min(4 * kChunk - filled, in_features - column);
    std::copy_n(scale + column, piece, row + filled);
    filled += piece;
  }
  load_magnitudes<Native<T>>(row, metric);
}

template <typename Format>
PROXSPARSE_INLINE void prox_chunks(const Task<Format>* task, int64_t begin, int64_t end) {
  using T = typename Format::Arithmetic;
  Lanes<T> z, w, metric, unscaled;
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    const int64_t first = chunk * kChunk, count = 4 * std::min<int64_t>(kChunk, task->blocks - first);
    const bool whole = count == 4 * kChunk;
    typename Format::Storage padded[4 * kChunk] = {};
    if (!whole) std::copy_n(task->weight + 4 * first, count, padded);
    typename Format::Storage* weight = whole ? task->weight + 4 * first : padded;

    load_magnitudes<Format>(weight, z);
    if (task->scale != nullptr) {
      load_scale(task->scale, task->in_features, 4 * first, metric);
      multiply(z, metric);
    }
    clear_unless_finite(z);
    solve_chunk(z, task->strength, task->n, w);
    if (task->scale != nullptr) divide(w, metric, unscaled);
    store_weights<Format>(z, w, task->scale != nullptr ? unscaled : w, weight);

    if (!whole) std::copy_n(padded, count, task->weight + 4 * first);
  }
}

template <typename Format>
void prox(const at::Tensor& weight, double reg_lambda, int64_t n, const std::optional<at::Tensor>& scale) {
  using T = typename Format::Arithmetic;
  const Task<Format> task{static_cast<typename Format::Storage*>(weight.mutable_data_ptr()),
                          weight.numel() / 4,
                          weight.size(-1),
                          scale ? scale->const_data_ptr<T>() : nullptr,
                          strength<T>(reg_lambda),
                          n};
  const int64_t chunks = (task.blocks + kChunk - 1) / kChunk;
  at::parallel_for(0, chunks, kChunksPerTask,
                   [&](int64_t begin, int64_t end) { run_vectorised<prox_chunks<Format>>(&task, begin, end); });
}

void check(const at::Tensor& weight, double reg_lambda, int64_t n, const std::optional<at::Tensor>& scale) {
  TORCH_CHECK_VALUE(weight.device().is_cpu() && weight.is_contiguous(), "weight must be a contiguous CPU tensor, not ",
                    weight.sizes(), " on ", weight.device(), "; call .cpu().contiguous() first");
  TORCH_CHECK_VALUE(weight.dim() > 0 && weight.size(-1) % 4 == 0, "weight of shape ", weight.sizes(),
                    ": in_features must be a multiple of 4; exclude this layer");
  TORCH_CHECK_VALUE(n == 1 || n == 2, "n=", n, ": this kernel serves 1:4 and 2:4; choose another backend");
  TORCH_CHECK_VALUE(reg_lambda >= 0 && reg_lambda <= std::numeric_limits<double>::max(), "reg_lambda=", reg_lambda,
                    " must be a finite number >= 0");
  if (scale) {
    const auto expected = weight.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    TORCH_CHECK_VALUE(scale->device().is_cpu() && scale->is_contiguous() && scale->scalar_type() == expected &&
                          scale->dim() == 1 && scale->size(0) == weight.size(-1),
                      "scale of shape ", scale->sizes(), " and dtype ", scale->scalar_type(),
                      ": it must be a contiguous ", expected, " CPU tensor of shape [", weight.size(-1), "]");
  }
}

}  // namespace

void prox_n4_(const at::Tensor& weight, double reg_lambda, int64_t n, const std::optional<at::Tensor>& scale) {
  check(weight, reg_lambda, n, scale);
  if (reg_lambda == 0) return;
  switch (weight.scalar_type()) {
    case at::kFloat:
      return prox<Float32>(weight, reg_lambda, n, scale);
    case at::kDouble:
      return prox<Float64>(weight, reg_lambda, n, scale);
    case at::kBFloat16:
      return prox<BFloat16>(weight, reg_lambda, n, scale);
    case at::kHalf:
      return prox<Float16>(weight, reg_lambda, n, scale);
    default:
      TORCH_CHECK_VALUE(false, "weight has dtype ", weight.scalar_type(),
                        ": convert it to float32, float64, bfloat16 or float16");
  }
}

}  // namespace proxsparse
