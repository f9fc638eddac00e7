// Runs one kernel, compiled three times, with the widest vectors of this CPU.
#pragma once

namespace proxsparse {

// In ascending order. `default` is what every CPU of the architecture has.
enum class Capability { kDefault, kAvx2, kAvx512 };

constexpr const char* name(Capability capability) {
  constexpr const char* names[] = {"default", "avx2", "avx512"};
  return names[static_cast<int>(capability)];
}

// The widest of this CPU, at most PROXSPARSE_CPU_CAPABILITY=default|avx2|avx512 of the environment, read once.
Capability capability();

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
  switch (capability()) {
    case Capability::kAvx512:
      return run_avx512<kernel>(args...);
    case Capability::kAvx2:
      return run_avx2<kernel>(args...);
    case Capability::kDefault:
      return kernel(args...);
  }
}

#else

template <auto kernel, typename... Args>
void run_vectorised(Args... args) {
  kernel(args...);
}

#endif

}  // namespace proxsparse
