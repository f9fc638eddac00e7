// The arithmetic of one step of AdamW, for one number or a vector of numbers. Source of the equations: `adamw_prox` in
// proxsparse/reference.
#pragma once

#include <cmath>

#include "calls.h"
#include "prox24_block.h"

namespace proxsparse {
inline namespace PROXSPARSE_ISA {

// The constants of a call. They are computed in double: in float, 1 - beta2 would be off by 1e-5.
template <typename T>
struct AdamW {
  T lr, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, decay, correction1, correction2;

  explicit AdamW(const AdamWProxCall& call)
      : lr(call.lr),
        beta1(call.beta1),
        one_minus_beta1(1 - call.beta1),
        beta2(call.beta2),
        one_minus_beta2(1 - call.beta2),
        eps(call.eps),
        decay(call.decay),
        correction1(call.correction1),
        correction2(call.correction2) {}

  // The step of v = c * w with the gradient g of v, as a step of w. rate: lr / c. Updates the moments, which are of v.
  template <typename V>
  PROXSPARSE_INLINE V step(V w, V g, V rate, V& exp_avg, V& exp_avg_sq) const {
    using std::sqrt;
    exp_avg = V(beta1) * exp_avg + V(one_minus_beta1) * g;
    exp_avg_sq = V(beta2) * exp_avg_sq + V(one_minus_beta2) * g * g;
    const V denominator = sqrt(exp_avg_sq) * V(correction2) + V(eps);
    return w * V(decay) - rate * (exp_avg * V(correction1) / denominator);
  }
};

}  // namespace PROXSPARSE_ISA
}  // namespace proxsparse
