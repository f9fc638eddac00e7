// The n largest of every four scores on the CPU.
#include <ATen/Parallel.h>

#include <limits>

#include "../ops.h"
#include "../prox24_block.h"
#include "formats.h"
#include "vectorised.h"

namespace proxsparse {
namespace {

constexpr int64_t kBlocksPerTask = 1 << 14;  // about 10 us of work, a few times what it costs to wake a thread

template <typename Format>
PROXSPARSE_INLINE void mask_blocks(const typename Format::Storage* score, int64_t n, bool* mask, int64_t begin,
                                   int64_t end) {
  using T = typename Format::Arithmetic;
  const T first_dropped = T(n) - T(0.5);
  const auto comparable = [](T value) __attribute__((always_inline)) {
    return value == value ? value : std::numeric_limits<T>::infinity();
  };
#pragma omp simd
  for (int64_t b = begin; b < end; ++b) {
    const Ranks<T> rank =
        rank_descending<T>({comparable(Format::load(score[4 * b])), comparable(Format::load(score[4 * b + 1])),
                            comparable(Format::load(score[4 * b + 2])), comparable(Format::load(score[4 * b + 3]))});
    mask[4 * b] = rank.r1 < first_dropped;
    mask[4 * b + 1] = rank.r2 < first_dropped;
    mask[4 * b + 2] = rank.r3 < first_dropped;
    mask[4 * b + 3] = rank.r4 < first_dropped;
  }
}

template <typename Format>
void mask_format(const at::Tensor& score, int64_t n, const at::Tensor& mask) {
  const auto* scores = static_cast<const typename Format::Storage*>(score.const_data_ptr());
  bool* kept = mask.mutable_data_ptr<bool>();
  at::parallel_for(0, score.numel() / 4, kBlocksPerTask, [=](int64_t begin, int64_t end) {
    run_vectorised<mask_blocks<Format>>(scores, n, kept, begin, end);
  });
}

}  // namespace

void mask_n4(const at::Tensor& score, int64_t n, const at::Tensor& mask) {
  TORCH_CHECK_VALUE(score.device().is_cpu() && score.is_contiguous(), "score must be a contiguous CPU tensor, not ",
                    score.sizes(), " on ", score.device(), "; call .cpu().contiguous() first");
  TORCH_CHECK_VALUE(score.dim() > 0 && score.size(-1) % 4 == 0, "score of shape ", score.sizes(),
                    ": in_features must be a multiple of 4; exclude this layer");
  TORCH_CHECK_VALUE(n == 1 || n == 2, "n=", n, ": this kernel serves 1:4 and 2:4; choose another backend");
  TORCH_CHECK_VALUE(mask.device().is_cpu() && mask.is_contiguous() && mask.scalar_type() == at::kBool &&
                        mask.sizes() == score.sizes(),
                    "mask of shape ", mask.sizes(), " and dtype ", mask.scalar_type(),
                    ": it must be a contiguous bool CPU tensor of shape ", score.sizes());
  switch (score.scalar_type()) {
    case at::kFloat:
      return mask_format<Float32>(score, n, mask);
    case at::kDouble:
      return mask_format<Float64>(score, n, mask);
    case at::kBFloat16:
      return mask_format<BFloat16>(score, n, mask);
    case at::kHalf:
      return mask_format<Float16>(score, n, mask);
    default:
      TORCH_CHECK_VALUE(false, "score has dtype ", score.scalar_type(),
                        ": convert it to float32, float64, bfloat16 or float16");
  }
}

}  // namespace proxsparse
