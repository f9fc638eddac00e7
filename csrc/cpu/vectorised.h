// Runs one kernel, compiled three times, with the widest vectors of this CPU.
#pragma once

namespace proxsparse {

#ifdef __x86_64__

template <auto kernel, typename... Args>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))) void run_avx512(Args... args) {
  kernel(args...);
}

template <auto kernel, typename... Args>
__attribute__((target("avx2,fma"))) void run_avx2(Args... args) {
  kernel(args...);
}

// `kernel` must be declared always_inline: only then is its body compiled anew for each instruction set.
// (The attribute target_clones would be shorter, but GCC selects its arch= clones by the maker of the CPU.)
template <auto kernel, typename... Args>
void run_vectorised(Args... args) {
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    run_avx512<kernel>(args...);
  } else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    run_avx2<kernel>(args...);
  } else {
    kernel(args...);
  }
}

#else

template <auto kernel, typename... Args>
void run_vectorised(Args... args) {
  kernel(args...);
}

#endif

}  // namespace proxsparse
