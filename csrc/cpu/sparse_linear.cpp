// x W^T + bias with a packed W on the CPU: checks, threads, and torch's matmul of unpacked parts.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

#include "../ops.h"
#include "kernels.h"

namespace proxsparse {
namespace {

constexpr int64_t kProductsPerTask = 1 << 18;  // about 10 us of work: a few times the cost of waking a thread

// Up to this number of rows the kernel that reads the packed weight is faster than the one that unpacks it. Measured
// with one core of an EPYC 9005 (AVX-512 BF16): both take the same time at 24 to 32 rows in bfloat16 and in float32.
constexpr int64_t kFewRows = 28;
constexpr int64_t kUnitsTogether = 1 << 21;  // of x are multiplied by all weights: 8 MB stay in the L3 cache

// From this number of rows torch's matmul of unpacked weights is faster on a CPU with AMX, for 192 x 576 and larger:
// eight times with 512 rows of 14336 x 4096. kMatmulWeights, 8 MB, are unpacked at a time, or 64 rows of the weight if
// these are more.
constexpr int64_t kMatmulRows = 24, kMatmulWeights = 1 << 22;

// Many rows of x are multiplied part by part, so that few parts of x and of a weight stay in the caches. For fewer rows
// reading the weight matters more, and whole rows of the weight are read faster. Measured with one core of an EPYC.
constexpr int64_t kRowsForParts = 160, kPart = 2048;

// Memory for a call, aligned as cache lines. Up to 4 MB stay with the thread: new memory costs page faults, which take
// a fifth of the time of a small call.
class Scratch {
 public:
  struct Free {
    void operator()(uint32_t* memory) const { ::operator delete(memory, kLine); }
  };
  using Memory = std::unique_ptr<uint32_t, Free>;
  struct Kept {
    Memory memory;
    int64_t units = 0;
  };

  Scratch(Kept& kept, int64_t units) {
    if (units > kKeptUnits) {
      own_ = allocate(units);
    } else if (units > kept.units) {
      kept = {nullptr, 0};
      kept = {allocate(units), units};
    }
    memory = own_ ? own_.get() : kept.memory.get();
  }

  uint32_t* memory;

 private:
  static constexpr std::align_val_t kLine{64};
  static constexpr int64_t kKeptUnits = 1 << 20;
  static Memory allocate(int64_t units) {
    return Memory(static_cast<uint32_t*>(::operator new(units * sizeof(uint32_t), kLine)));
  }
  Memory own_;
};

thread_local Scratch::Kept kept_panels, kept_sums;

// f(begin, end) for parts of `features` output features each.
template <typename F>
void parallel_features(const SparseLinearCall& call, int64_t features, F f) {
  const int64_t parts_per_task = kProductsPerTask / (features * call.rows * call.in_features + 1) + 1;
  at::parallel_for(0, (call.out_features + features - 1) / features, parts_per_task, f);
}

void few_rows(const SparseLinearCall& call, Codes codes, Dtype dtype) {
  const auto sparse_linear_tiles = kernels().sparse_linear[codes][dtype];
  parallel_features(call, kTile, [&](int64_t begin, int64_t end) { sparse_linear_tiles(call, begin, end); });
}

// The call for the rows from `first` on, x and y with numbers of these sizes in bytes.
SparseLinearCall rows_from(const SparseLinearCall& call, int64_t first, int64_t x_size, int64_t y_size) {
  SparseLinearCall part = call;
  part.x = static_cast<const char*>(call.x) + first * call.in_features * x_size;
  part.y = static_cast<char*>(call.y) + first * call.out_features * y_size;
  part.rows = call.rows - first;
  return part;
}

void many_rows(const SparseLinearCall& call, Codes codes, Dtype dtype, int64_t x_size, int64_t y_size) {
  const int64_t panel_rows = kernels().panel_rows, group_features = kernels().group_features;
  // Fewer rows than three quarters of a panel take less time as few rows than as a panel.
  const int64_t panels = (call.rows + panel_rows / 4) / panel_rows, units = call.in_features * x_size / 4;
  const Scratch x_panels(kept_panels, panels * panel_rows * units);
  const RowPanelsCall transposed{call.x, x_panels.memory, call.rows, units};
  at::parallel_for(0, panels, kProductsPerTask / (panel_rows * units + 1) + 1,
                   [&](int64_t begin, int64_t end) { kernels().row_panels(transposed, begin, end); });
  const int64_t together = std::min<int64_t>(units, call.rows < kRowsForParts ? kUnpackedUnits : kPart);
  SparseGemmCall gemm{call, rows_from(call, panels * panel_rows, x_size, y_size), x_panels.memory, panels};
  gemm.units_together = together;
  const int64_t unpacked = (together + kChunkUnits - 1) / kChunkUnits * kChunkUnits;
  gemm.groups_together = std::min<int64_t>(kUnpackedUnits / unpacked, kUnpackedUnits / kPart);
  parallel_features(call, group_features, [&](int64_t begin, int64_t end) {
    const int64_t groups = units > together ? end - begin : gemm.groups_together;
    const int64_t scratch_units = group_features * (kUnpackedUnits + groups * panels * panel_rows);
    const Scratch scratch(kept_sums, scratch_units);
    kernels().sparse_gemm[codes][dtype](gemm, scratch.memory, begin, end);
  });
}

// Copies a row of x to the windows of its blocks, and fills the row with zeros; proxsparse/reference/windows.py.
template <typename T>
void expand_row(const T* x, int64_t in_features, int64_t m, T* row, int64_t expanded) {
  constexpr int64_t kWindow = 4, kStep = 2;
  T* const end = row + expanded;
  int64_t block = 0;
  for (; block + m <= in_features; block += m) {
    for (int64_t first = 0; first + kWindow <= m; first += kStep, row += kWindow) {
      std::memcpy(row, x + block + first, kWindow * sizeof(T));
    }
  }
  std::fill(row, end, T(0));
  for (; block < in_features; block += kStep, row += kWindow) std::memcpy(row, x + block, kStep * sizeof(T));
}

// x [..., in_features] -> [..., expanded], float32 or bfloat16.
at::Tensor expand(const at::Tensor& x, int64_t m, int64_t expanded) {
  auto sizes = x.sizes().vec();
  sizes.back() = expanded;
  const at::Tensor result = at::empty(sizes, x.options());
  const int64_t in_features = x.size(-1), rows = result.numel() / expanded;
  const auto rows_of = [&](auto zero) {
    using T = decltype(zero);
    const T* from = static_cast<const T*>(x.const_data_ptr());
    T* to = static_cast<T*>(result.mutable_data_ptr());
    at::parallel_for(0, rows, kProductsPerTask / expanded + 1, [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        expand_row(from + i * in_features, in_features, m, to + i * expanded, expanded);
    });
  };
  x.element_size() == 2 ? rows_of(uint16_t()) : rows_of(uint32_t());
  return result;
}

// oneDNN has the kernels for AMX.
bool by_matmul(const at::Tensor& x, int64_t rows, int64_t m) {
  return has_amx() && at::globalContext().userEnabledMkldnn() && x.scalar_type() == at::kBFloat16 &&
         rows >= kMatmulRows && x.size(-1) > 0 && m <= kLargestBlock;
}

// y <- x W^T + bias for bfloat16 x, whose columns are those of the dense weight, in blocks of m.
void unpacked_matmul(const SparseLinearCall& call, Codes codes, int64_t m, const at::Tensor& x,
                     const OptionalTensor& bias, const at::Tensor& y) {
  const int64_t in_features = x.size(-1), most = std::max<int64_t>(kMatmulWeights / in_features / 64, 1) * 64;
  const int64_t together = std::min(most, call.out_features);
  const at::Tensor weight = at::empty({together, in_features}, x.options());
  const at::Tensor x_rows = x.view({call.rows, in_features}), y_rows = y.view({call.rows, call.out_features});
  auto* unpacked = static_cast<uint16_t*>(weight.mutable_data_ptr());
  for (int64_t first = 0; first < call.out_features; first += together) {
    const int64_t features = std::min(together, call.out_features - first);
    at::parallel_for(0, features, kProductsPerTask / in_features + 1, [&](int64_t begin, int64_t end) {
      kernels().unpack_features[codes](call, in_features, m, first + begin, first + end,
                                       unpacked + begin * in_features);
    });
    at::Tensor part = y_rows.narrow(1, first, features);
    const at::Tensor transposed = weight.narrow(0, 0, features).t();
    if (bias) {
      at::addmm_out(part, bias->narrow(0, first, features), x_rows, transposed);
    } else {
      at::mm_out(part, x_rows, transposed);
    }
  }
}

// y <- x W^T + bias for checked tensors, x and y with any leading dimensions. x has the columns of the dense weight, in
// blocks of m; a kernel that reads packed columns gets x expanded.
void multiply(const at::Tensor& given, const at::Tensor& values, const at::Tensor& indices,
              const OptionalTensor& scales, const OptionalTensor& bias, const at::Tensor& y, int64_t m) {
  if (y.numel() == 0) return;
  const int64_t rows = y.numel() / y.size(-1), packed = expanded_features(given.size(-1), m);
  const bool unpacks = by_matmul(given, rows, m);
  const at::Tensor x = unpacks || given.size(-1) == packed ? given : expand(given, m, packed);
  const bool reads_dtype = x.scalar_type() == at::kFloat || kernels().reads_bfloat16;
  const at::Tensor readable = reads_dtype ? x : x.to(at::kFloat);
  const SparseLinearCall call{readable.const_data_ptr(),
                              values.const_data_ptr(),
                              indices.const_data_ptr<uint8_t>(),
                              data_or_null(scales),
                              data_or_null(bias),
                              y.mutable_data_ptr(),
                              rows,
                              packed,
                              y.size(-1)};
  const Dtype dtype = dtype_of(x, "x");
  const Codes codes = codes_of(values, scales);
  if (unpacks) return unpacked_matmul(call, codes, m, x, bias, y);
  const int64_t x_size = readable.element_size(), y_size = y.element_size();
  const int64_t units = std::min<int64_t>(call.in_features * x_size / 4, kPart);
  const int64_t rows_together = std::min<int64_t>(kUnitsTogether / std::max<int64_t>(units, 1) / 32 * 32, 8192);
  for (int64_t first = 0; first < call.rows; first += rows_together) {
    SparseLinearCall part = rows_from(call, first, x_size, y_size);
    part.rows = std::min(part.rows, rows_together);
    if (part.rows <= kFewRows || part.in_features == 0) {
      few_rows(part, codes, dtype);
    } else {
      many_rows(part, codes, dtype, x_size, y_size);
    }
  }
}

// Whether a kernel may read the tensor without the dispatcher of torch: a contiguous tensor in the memory of the CPU,
// without autocast, a mode (fake tensors, counting of flops, vmap, tracing) or a gradient to compute.
bool is_plain(const at::Tensor& tensor) {
  const auto state = c10::impl::tls_local_dispatch_key_set();
  const auto keys = (tensor.key_set() | state.included_) - state.excluded_;
  constexpr c10::DispatchKeySet plain{c10::DispatchKey::Dense, c10::DispatchKey::BackendSelect,
                                      c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::AutogradFunctionality};
  const bool differentiable = keys.has(c10::DispatchKey::AutogradFunctionality) && c10::GradMode::is_enabled() &&
                              (tensor.requires_grad() || tensor._fw_grad(0).defined());
  return tensor.is_cpu() && tensor.is_contiguous() && !differentiable &&
         (keys - plain).highestPriorityTypeId() == c10::DispatchKey::Undefined;
}

}  // namespace

void sparse_linear(const at::Tensor& x, const at::Tensor& values, const at::Tensor& indices,
                   const OptionalTensor& scales, const OptionalTensor& bias, const at::Tensor& y, int64_t m) {
  TORCH_CHECK_VALUE(x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16, "x has dtype ", x.scalar_type(),
                    ": this kernel supports float32 and bfloat16; choose another backend");
  check_sparse_linear(at::kCPU, x, values, indices, scales, bias, y, m);
  multiply(x, values, indices, scales, bias, y, m);
}

OptionalTensor sparse_linear_direct(const at::Tensor& x, const at::Tensor& values, const at::Tensor& indices,
                                    const OptionalTensor& scales, const OptionalTensor& bias, int64_t m) {
  const at::ScalarType dtype = x.scalar_type();
  const bool plain = is_plain(x) && is_plain(values) && is_plain(indices) && (!scales || is_plain(*scales)) &&
                     (!bias || is_plain(*bias)) && !at::impl::torch_function_mode_enabled();
  if (!plain || (dtype != at::kFloat && dtype != at::kBFloat16) || x.dim() == 0 || values.dim() != 2 ||
      dtype != (scales ? *scales : values).scalar_type() || (bias && dtype != bias->scalar_type()) || m < 4 ||
      m % 2 != 0 || x.size(-1) % 2 != 0 ||
      expanded_features(x.size(-1), m) != values.size(1) * (codes_of(values, scales) == kInt4 ? 4 : 2)) {
    return std::nullopt;
  }
  const int64_t expanded = expanded_features(x.size(-1), m);
  RECORD_FUNCTION("proxsparse::sparse_linear", c10::ArrayRef<const c10::IValue>{});
  check_packed_weight(at::kCPU, dtype, expanded, values, indices, scales, bias);
  auto sizes = x.sizes().vec();
  sizes.back() = values.size(0);
  const at::Tensor y = at::empty(sizes, x.options());
  multiply(x, values, indices, scales, bias, y, m);
  return y;
}

}  // namespace proxsparse
