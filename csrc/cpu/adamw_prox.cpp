// The fused step on the CPU: checks, and the threads.
#include <ATen/Parallel.h>

#include <cmath>

#include "../ops.h"
#include "dtypes.h"
#include "kernels.h"

namespace proxsparse {
namespace {

constexpr int64_t kChunksPerTask = 8;  // about 10 us of work, a few times what it costs to wake a thread

void check_like(const at::Tensor& tensor, const char* what, const at::Tensor& weight, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(tensor.device().is_cpu() && tensor.is_contiguous() && tensor.sizes() == weight.sizes() &&
                        tensor.scalar_type() == dtype,
                    what, " of shape ", tensor.sizes(), " and dtype ", tensor.scalar_type(),
                    ": it must be a contiguous ", dtype, " CPU tensor of shape ", weight.sizes());
}

}  // namespace

void adamw_prox_(const at::Tensor& weight, const at::Tensor& grad, const at::Tensor& exp_avg,
                 const at::Tensor& exp_avg_sq, const std::optional<at::Tensor>& master,
                 const std::optional<at::Tensor>& pretrained, const std::optional<at::Tensor>& scale, int64_t step,
                 double lr, double beta1, double beta2, double eps, double weight_decay, double reg_lambda, int64_t n,
                 double frozen_lambda, double frozen_eps, std::optional<int64_t> seed) {
  const Dtype dtype = dtype_of(weight, "weight");
  const auto arithmetic = dtype == kFloat64 ? at::kDouble : at::kFloat;
  const bool short_moments = exp_avg.scalar_type() == at::kBFloat16 && dtype != kFloat64;
  check_like(weight, "weight", weight, weight.scalar_type());
  check_like(grad, "grad", weight, weight.scalar_type());
  check_like(exp_avg, "exp_avg", weight, short_moments ? at::kBFloat16 : arithmetic);
  check_like(exp_avg_sq, "exp_avg_sq", weight, exp_avg.scalar_type());
  if (master) check_like(*master, "master", weight, at::kFloat);
  TORCH_CHECK_VALUE(!master || dtype == kBFloat16 || dtype == kFloat16, "master: a weight of dtype ",
                    weight.scalar_type(), " is its own master");
  if (pretrained) check_like(*pretrained, "pretrained", weight, weight.scalar_type());
  TORCH_CHECK_VALUE(pretrained || frozen_lambda == 0, "frozen_lambda=", frozen_lambda, " needs pretrained weights");
  TORCH_CHECK_VALUE(step >= 1, "step=", step, ": steps are counted from 1");
  TORCH_CHECK_VALUE(reg_lambda >= 0 && std::isfinite(reg_lambda), "reg_lambda=", reg_lambda,
                    " must be a finite number >= 0");
  TORCH_CHECK_VALUE(reg_lambda == 0 || (n == 1 || n == 2), "n=", n, ": this kernel serves 1:4 and 2:4");
  TORCH_CHECK_VALUE(reg_lambda == 0 || (weight.dim() > 0 && weight.size(-1) % 4 == 0), "weight of shape ",
                    weight.sizes(), ": in_features must be a multiple of 4; exclude this layer");
  TORCH_CHECK_VALUE(
      !scale || (weight.dim() > 0 && scale->device().is_cpu() && scale->is_contiguous() &&
                 scale->scalar_type() == arithmetic && scale->dim() == 1 && scale->size(0) == weight.size(-1)),
      "scale must be a contiguous ", arithmetic, " CPU tensor with one number for each input feature");
  if (weight.numel() == 0) return;

  const AdamWProxArguments arguments{
      .weight = weight.mutable_data_ptr(),
      .grad = grad.const_data_ptr(),
      .exp_avg = exp_avg.mutable_data_ptr(),
      .exp_avg_sq = exp_avg_sq.mutable_data_ptr(),
      .master = master ? master->mutable_data_ptr<float>() : nullptr,
      .pretrained = frozen_lambda > 0 ? pretrained->const_data_ptr() : nullptr,
      .scale = scale ? scale->const_data_ptr() : nullptr,
      .numel = weight.numel(),
      .in_features = scale ? weight.size(-1) : 1,
      .lr = lr,
      .beta1 = beta1,
      .beta2 = beta2,
      .eps = eps,
      .decay = 1 - lr * weight_decay,
      .correction1 = 1 / (1 - std::pow(beta1, step)),
      .correction2 = 1 / std::sqrt(1 - std::pow(beta2, step)),
      .reg_lambda = reg_lambda,
      .n = n,
      .frozen_lambda = frozen_lambda,
      .frozen_eps = frozen_eps,
      .stochastic = seed.has_value(),
      .seed = static_cast<uint64_t>(seed.value_or(0)),
  };
  const auto step_chunks = (short_moments ? kernels().adamw_prox_bfloat16_moments : kernels().adamw_prox)[dtype];
  at::parallel_for(0, (weight.numel() + kChunkWeights - 1) / kChunkWeights, kChunksPerTask,
                   [&](int64_t begin, int64_t end) { step_chunks(arguments, begin, end); });
}

}  // namespace proxsparse
