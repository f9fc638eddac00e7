// Makes a Tile of a kind of CUTLASS kernel, which defines Gemm (its adapter), arguments(call) and kArchitecture.
#pragma once

#include "cutlass/cutlass.h"
#include "gemm.h"

namespace proxsparse::gemm {

template <typename Kind>
size_t workspace_bytes(const Call& call) {
  return Kind::Gemm::get_workspace_size(Kind::arguments(call));
}

template <typename Kind>
const char* run(const Call& call, cudaStream_t stream) {
  typename Kind::Gemm gemm;
  cutlass::Status status = gemm.can_implement(Kind::arguments(call));
  if (status == cutlass::Status::kSuccess) status = gemm.initialize(Kind::arguments(call), call.workspace, stream);
  if (status == cutlass::Status::kSuccess) status = gemm.run(stream);
  return status == cutlass::Status::kSuccess ? nullptr : cutlass::cutlassGetStatusString(status);
}

template <typename Kind>
Tile tile(const char* name) {
  return {name, Kind::kArchitecture, workspace_bytes<Kind>, run<Kind>};
}

}  // namespace proxsparse::gemm
