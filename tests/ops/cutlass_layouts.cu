// Reads architecture, out_features, in_features (text) and the indices (bytes); writes the metadata of CUTLASS's
// kernels for them, by the functions and layouts of its headers, evaluated on this CPU.
#include "cutlass/cutlass.h"
// keeps the order: the others need cutlass.h
#include <cstdint>
#include <cstdio>
#include <vector>

#include "cutlass/gemm/collective/builders/sm90_sparse_config.inl"
#include "cutlass/layout/matrix.h"
#include "cutlass/numeric_types.h"
#include "cutlass/tensor_ref.h"
#include "cutlass/util/host_reorder.h"

using Bytes = std::vector<uint8_t>;

using Element = uint16_t;  // the metadata that a lane holds

static Bytes sm80(const Bytes& indices, int rows, int columns) {
  const int elements = columns / 8 / static_cast<int>(sizeof(Element));
  Bytes metadata(indices.size());
  const auto layout = cutlass::layout::ColumnMajorInterleaved<2>::packed({rows, elements});
  auto* from = reinterpret_cast<Element*>(const_cast<uint8_t*>(indices.data()));
  cutlass::TensorRef<Element, cutlass::layout::RowMajor> source(from, {elements});
  cutlass::TensorRef<Element, cutlass::layout::ColumnMajorInterleaved<2>> target(
      reinterpret_cast<Element*>(metadata.data()), layout);
  cutlass::reorder_meta(target, source, {rows, 0, elements});
  return metadata;
}

static Bytes sm90(const Bytes& indices, int rows, int columns) {
  using Config = cutlass::Sm90GemmSparseConfig<cute::sparse_elem<2, cutlass::bfloat16_t>, cute::SM90::GMMA::Major::K,
                                               cute::sparse_elem<8, uint8_t>, cute::_128>;
  const auto layout = Config::fill_layoutE(cute::make_shape(rows, 1, columns, 1));
  Bytes metadata(cute::cosize(layout) / 8, 0x44);
  for (int row = 0; row < rows; ++row) {
    for (int column = 0; column < columns; column += 4) {  // a block is half a byte
      const auto place = layout(cute::make_coord(row, column, 0));
      const int nibble = indices[row * (columns / 8) + column / 8] >> column % 8 & 15, shift = place % 8 / 4 * 4;
      auto& byte = metadata[place / 8];
      byte = static_cast<uint8_t>((byte & ~(15 << shift)) | nibble << shift);
    }
  }
  return metadata;
}

int main() {
  int architecture = 0, rows = 0, columns = 0;
  if (std::scanf("%d %d %d", &architecture, &rows, &columns) != 3) return 1;
  std::getchar();
  Bytes indices(static_cast<size_t>(rows) * columns / 8);
  if (std::fread(indices.data(), 1, indices.size(), stdin) != indices.size()) return 1;
  const Bytes metadata = (architecture == 80 ? sm80 : sm90)(indices, rows, columns);
  std::fwrite(metadata.data(), 1, metadata.size(), stdout);
  return 0;
}
