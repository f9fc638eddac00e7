// What the kernels need of the standard library, included before an instruction set is chosen: its functions may be
// shared with the rest of the program, which runs on any CPU.
#pragma once

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
