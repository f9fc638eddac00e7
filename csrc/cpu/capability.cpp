// Which instruction set the kernels run with.
#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "../ops.h"
#include "vectorised.h"

namespace proxsparse {
namespace {

Capability widest() {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return Capability::kAvx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Capability::kAvx2;
#endif
  return Capability::kDefault;
}

Capability limit() {
  const char* variable = std::getenv("PROXSPARSE_CPU_CAPABILITY");
  if (variable == nullptr) return Capability::kAvx512;
  for (const Capability capability : {Capability::kDefault, Capability::kAvx2, Capability::kAvx512}) {
    if (std::string(variable) == name(capability)) return capability;
  }
  throw std::invalid_argument("PROXSPARSE_CPU_CAPABILITY='" + std::string(variable) +
                              "': choose one of default, avx2, avx512");
}

}  // namespace

Capability capability() {
  static const Capability chosen = std::min(widest(), limit());
  return chosen;
}

std::string cpu_capability() { return name(capability()); }

}  // namespace proxsparse
