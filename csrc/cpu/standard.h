// The standard headers of the kernels. They must be included before an instruction set is chosen: the linker may share
// their functions with the rest of the program, which runs on any CPU.
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
