// The plain description of a batched matrix product, shared by the binding and
// the kernel. No torch, no CUDA.
#pragma once

#include "strided.h"

namespace cuda_ops {

// Elements to step per row and per column. A transpose is the two swapped.
struct MatrixStrides {
  int64_t row = 0;
  int64_t col = 0;
};

// How float32 is multiplied. The others are opt-in: tf32 keeps 10 bits of each
// factor, tf32x3 splits factors in two of those and is about as exact as float32.
enum class Precision : int32_t { kIeee, kTF32, kTF32x3 };

// out[m, n] = sum over k of a[m, k] * b[k, n], once per point of `batch`: the
// batch is a strided problem whose operands (out, a, b) are matrices.
struct Matmul {
  int64_t m = 0, n = 0, k = 0;
  Strided<2> batch;
  MatrixStrides out, a, b;
  Precision precision = Precision::kIeee;
  bool built_for_hopper = false;  // the library holds sm_90a code
};

// Whether factors are split in two.
inline bool is_split(const Matmul& p) {
  return p.batch.dtype == DType::kFloat32 && p.precision == Precision::kTF32x3;
}

// Makes one taller matrix of a batch where b is the same along a dim and the rows of a and out
// simply continue from one matrix to the next: (B, T, K) times a weight. Rows then fill tiles
// across the matrices' borders. A single row continues anywhere, since nothing steps by its own
// stride: the last token of each sequence, hidden[:, -1:].
inline Matmul fold_batch(Matmul p) {
  auto& batch = p.batch;
  const auto step = [&](int operand) { return batch.operands[operand].strides[0]; };
  while (batch.dims > 0 && step(2) == 0) {
    if (p.m == 1) {
      p.a.row = step(1);
      p.out.row = step(0);
    }
    if (step(1) != p.m * p.a.row || step(0) != p.m * p.out.row) break;
    p.m *= batch.sizes[0];
    batch.drop_dim(0);
  }
  return p;
}

// Whether an operand, a matrix of `strides`, is made of aligned vectors of 16 bytes
// along its rows or its columns.
inline bool whole_vectors(const Matmul& p, int operand, const MatrixStrides& strides) {
  const Operand& matrix = p.batch.operands[operand];
  const auto whole = [&](int64_t stride) { return stride * size_of(p.batch.dtype) % 16 == 0; };
  if (!is_aligned(matrix.data, 16)) return false;
  for (int d = 0; d < p.batch.dims; ++d) {
    if (!whole(matrix.strides[d])) return false;
  }
  const bool by_row = strides.row < strides.col;
  return (by_row ? strides.row : strides.col) == 1 && whole(by_row ? strides.col : strides.row);
}

// Returns the elements from one matrix of an operand to the next, all batch dims taken as one: 0
// where it is the same for all, -1 where steps differ.
inline int64_t batch_step(const Matmul& p, int operand) {
  const auto& strides = p.batch.operands[operand].strides;
  const int64_t step = p.batch.dims == 0 ? 0 : strides[0];
  int64_t points = 1;
  for (int d = 0; d < p.batch.dims; ++d) {
    if (strides[d] != step * points) return -1;
    points *= p.batch.sizes[d];
  }
  return step;
}

}  // namespace cuda_ops
