// Tensors as matrix products: the problem as plain numbers, and the loop that the
// CPU runs.
#pragma once

#include "binding.h"
#include "gemm/gemm.h"

namespace cuda_ops {

// The last two dims of a tensor as a matrix, or as its transpose.
struct Matrix {
  const Tensor& tensor;
  int64_t rows, cols;
  MatrixStrides strides;

  Matrix(const Tensor& t)
      : tensor(t),
        rows(t.size(t.dim() - 2)),
        cols(t.size(t.dim() - 1)),
        strides{t.stride(t.dim() - 2), t.stride(t.dim() - 1)} {}
};

inline Matrix transposed(Matrix matrix) {
  std::swap(matrix.rows, matrix.cols);
  std::swap(matrix.strides.row, matrix.strides.col);
  return matrix;
}

inline Matmul product(const Matrix& out, const Matrix& a, const Matrix& b,
                      Precision precision = Precision::kIeee) {
  return {out.rows,
          out.cols,
          a.cols,
          strided({writable_view(out.tensor)}, {a.tensor, b.tensor}, 2),
          out.strides,
          a.strides,
          b.strides,
          precision,
          built_for_hopper()};
}

// Refuses a batch that Strided does not hold, in the name of the factor with more dims.
inline void check_batch(const char* argument, const Tensor& factor,
                        const std::vector<int64_t>& batch) {
  const auto ones = std::count(batch.begin(), batch.end(), 1);
  if (static_cast<int64_t>(batch.size()) - ones > kMaxDims) {
    refuse(argument,
           "at most " + std::to_string(kMaxDims) + " batch dims other than 1 in the result",
           "shape " + shape_name(factor));
  }
}

// Calls `run(workspace)` with the memory that a plan's copies need, or with none.
template <class Run>
cudaError_t with_workspace(const Tensor& like, const GemmPlan& plan, Run&& run) {
  if (!plan.pack.any()) return run(nullptr);
  // Freed when this returns: torch's allocator gives it to later work of this stream only.
  const Tensor workspace = empty({plan.pack.bytes()}, DType::kUInt8, like);
  return run(workspace.mutable_data_ptr());
}

// --- CPU ----------------------------------------------------------------------

// Computes the product, each row of the output in float64 until `finish(tag, out, sums)` has
// changed it; `out` is where the row lies, in elements from the output's start.
template <class Finish>
void multiply(const Matmul& p, Finish finish) {
  if (p.n == 0) return;
  const int64_t grain = 1 + 32768 / (p.n * (p.k + 1));
  visit_floating_cpu(p.batch.dtype, [&](auto tag) {
    using T = decltype(tag);
    const auto data = [&](int i) { return static_cast<T*>(p.batch.operands[i].data); };
    parallel_for(p.batch.numel * p.m, grain, [&](int64_t begin, int64_t end) {
      std::vector<double> sums(p.n);
      for (int64_t index = begin; index < end; ++index) {
        const auto at = p.batch.offsets_at(index / p.m);
        const int64_t row = index % p.m, out = at[0] + row * p.out.row;
        const T* a = data(1) + at[1] + row * p.a.row;
        const T* b = data(2) + at[2];
        std::fill(sums.begin(), sums.end(), 0.0);
        for (int64_t i = 0; i < p.k; ++i) {
          const auto value = static_cast<double>(a[i * p.a.col]);
          for (int64_t j = 0; j < p.n; ++j) {
            sums[j] += value * static_cast<double>(b[i * p.b.row + j * p.b.col]);
          }
        }
        finish(tag, out, sums);
        for (int64_t j = 0; j < p.n; ++j) data(0)[out + j * p.out.col] = static_cast<T>(sums[j]);
      }
    });
  });
}

inline void multiply(const Matmul& p) {
  multiply(p, [](auto, int64_t, std::vector<double>&) {});
}

}  // namespace cuda_ops
