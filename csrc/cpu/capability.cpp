// Which instruction set the kernels run with.
#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "../ops.h"
#include "kernels.h"

namespace proxsparse {
namespace {

struct Capability {
  const char* name;
  const Kernels* kernels;
};
constexpr Capability kCapabilities[] = {
    // in ascending order
    {"default", &kDefaultKernels},
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
    {"avx2", &kAvx2Kernels},
    {"avx512", &kAvx512Kernels},
    {"avx512_bf16", &kAvx512Bf16Kernels},
#endif
};

size_t widest() {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    const bool expands = __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2");
    return expands && __builtin_cpu_supports("avx512bf16") ? 3 : 2;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
  return 0;
}

size_t limit() {
  const char* variable = std::getenv("PROXSPARSE_CPU_CAPABILITY");
  constexpr const char* names[] = {"default", "avx2", "avx512", "avx512_bf16"};
  for (size_t i = 0; i < 4; ++i) {
    if (variable == nullptr || std::string(variable) == names[3 - i]) return 3 - i;
  }
  throw std::invalid_argument("PROXSPARSE_CPU_CAPABILITY='" + std::string(variable) +
                              "': choose one of default, avx2, avx512, avx512_bf16");
}

const Capability& capability() {
  static const size_t chosen = std::min(widest(), limit());
  return kCapabilities[chosen];
}

}  // namespace

const Kernels& kernels() { return *capability().kernels; }

std::string cpu_capability() { return capability().name; }

}  // namespace proxsparse
