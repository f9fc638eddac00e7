// The kernels for the instructions that every CPU of the architecture has.
#include "standard.h"

#define PROXSPARSE_ISA portable
#define PROXSPARSE_VECTOR_BYTES 16
#include "kernels_table.h"

const proxsparse::Kernels proxsparse::kDefaultKernels = proxsparse::kKernels;
