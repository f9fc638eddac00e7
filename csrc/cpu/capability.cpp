// Chooses the instruction set of the kernels.
#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <stdexcept>
#include <string>

#include "../ops.h"
#include "kernels.h"

namespace proxsparse {
namespace {

// In ascending order. A build without the kernels of a name accepts the name as a limit. amx has the kernels of
// avx512_bf16, and uses torch's matmul for many rows.
enum Capability : size_t { kDefault, kAvx2, kAvx512, kAvx512Bf16, kAmx };
constexpr const char* kNames[] = {"default", "avx2", "avx512", "avx512_bf16", "amx"};
constexpr const Kernels* kKernels[] = {
    &kDefaultKernels,
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
    &kAvx2Kernels,    &kAvx512Kernels, &kAvx512Bf16Kernels, &kAvx512Bf16Kernels,
#endif
};

size_t widest() {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    const bool expands = __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2");
    if (!expands || !__builtin_cpu_supports("avx512bf16")) return kAvx512;
    return __builtin_cpu_supports("amx-bf16") ? kAmx : kAvx512Bf16;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return kAvx2;
#endif
  return kDefault;
}

size_t limit() {
  const char* variable = std::getenv("PROXSPARSE_CPU_CAPABILITY");
  if (variable == nullptr) return std::size(kNames) - 1;
  for (size_t i = 0; i < std::size(kNames); ++i) {
    if (std::string(variable) == kNames[i]) return i;
  }
  throw std::invalid_argument("PROXSPARSE_CPU_CAPABILITY='" + std::string(variable) +
                              "': choose one of default, avx2, avx512, avx512_bf16, amx");
}

size_t capability() {
  static const size_t chosen = std::min(widest(), limit());
  return chosen;
}

}  // namespace

const Kernels& kernels() { return *kKernels[capability()]; }

bool has_amx() { return capability() == kAmx; }

std::string cpu_capability() { return kNames[capability()]; }

}  // namespace proxsparse
