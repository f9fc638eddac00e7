// Defines one table of kernels: included last by a file that has chosen an instruction set.
#pragma once

#include "mask_blocks.h"
#include "prox_chunks.h"

namespace proxsparse {
inline namespace PROXSPARSE_ISA {

constexpr Kernels kKernels = {
    {prox_chunks<Float32>, prox_chunks<Float64>, prox_chunks<BFloat16>, prox_chunks<Float16>},
    {mask_blocks<Float32>, mask_blocks<Float64>, mask_blocks<BFloat16>, mask_blocks<Float16>},
};

}  // namespace PROXSPARSE_ISA
}  // namespace proxsparse
