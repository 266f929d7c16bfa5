// matmul(a, b) over broadcasting batch dims, and its gradients.
#include "matmul.h"

#include "binding.h"

using namespace cuda_ops;

cudaError_t matmul_launch(const Matmul& problem, cudaStream_t stream);

namespace {

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

Matrix transposed(Matrix matrix) {
  std::swap(matrix.rows, matrix.cols);
  std::swap(matrix.strides.row, matrix.strides.col);
  return matrix;
}

Matmul product(const Matrix& out, const Matrix& a, const Matrix& b) {
  return {out.rows,    out.cols,  a.cols,   strided({written(out.tensor)}, {a.tensor, b.tensor}, 2),
          out.strides, a.strides, b.strides};
}

Tensor empty_matrices(std::vector<int64_t> shape, int64_t rows, int64_t cols, const Tensor& like) {
  shape.insert(shape.end(), {rows, cols});
  return empty(shape, like);
}

Tensor empty_product(const Tensor& a, const Tensor& b) {
  return empty_matrices(detail::broadcast_shape("matmul", {a, b}, 2), Matrix(a).rows,
                        Matrix(b).cols, a);
}

std::tuple<Tensor, Tensor> empty_gradients(const Tensor& grad_out, const Tensor& a,
                                           const Tensor& b) {
  const auto batch = detail::broadcast_shape("matmul_backward", {grad_out, a, b}, 2);
  return {empty_matrices(batch, Matrix(a).rows, Matrix(a).cols, a),
          empty_matrices(batch, Matrix(b).rows, Matrix(b).cols, b)};
}

// --- CPU ----------------------------------------------------------------------

template <class T>
void multiply_row(const Matmul& p, int64_t index, std::vector<double>& sums) {
  const auto at = p.batch.offsets_at(index / p.m);
  const int64_t row = index % p.m;
  T* out = static_cast<T*>(p.batch.operands[0].data) + at[0] + row * p.out.row;
  const T* a = static_cast<const T*>(p.batch.operands[1].data) + at[1] + row * p.a.row;
  const T* b = static_cast<const T*>(p.batch.operands[2].data) + at[2];
  std::fill(sums.begin(), sums.end(), 0.0);
  for (int64_t i = 0; i < p.k; ++i) {
    const auto value = static_cast<double>(a[i * p.a.col]);
    for (int64_t j = 0; j < p.n; ++j) {
      sums[j] += value * static_cast<double>(b[i * p.b.row + j * p.b.col]);
    }
  }
  for (int64_t j = 0; j < p.n; ++j) out[j * p.out.col] = static_cast<T>(sums[j]);
}

void multiply(const Matmul& problem) {
  if (problem.n == 0) return;
  const int64_t grain = 1 + 32768 / (problem.n * (problem.k + 1));
  visit_floating_cpu(problem.batch.dtype, [&](auto tag) {
    detail::parallel_for(problem.batch.numel * problem.m, grain, [&](int64_t begin, int64_t end) {
      std::vector<double> sums(problem.n);
      for (int64_t i = begin; i < end; ++i) multiply_row<decltype(tag)>(problem, i, sums);
    });
  });
}

Tensor matmul_cpu(const Tensor& a, const Tensor& b) {
  Tensor out = empty_product(a, b);
  multiply(product(out, a, b));
  return out;
}

std::tuple<Tensor, Tensor> matmul_backward_cpu(const Tensor& grad_out, const Tensor& a,
                                               const Tensor& b) {
  auto [grad_a, grad_b] = empty_gradients(grad_out, a, b);
  multiply(product(grad_a, grad_out, transposed(b)));
  multiply(product(grad_b, transposed(a), grad_out));
  return {grad_a, grad_b};
}

// --- CUDA ---------------------------------------------------------------------

Tensor matmul_cuda(const Tensor& a, const Tensor& b) {
  Tensor out = empty_product(a, b);
  launch("matmul", a,
         [&](cudaStream_t stream) { return matmul_launch(product(out, a, b), stream); });
  return out;
}

std::tuple<Tensor, Tensor> matmul_backward_cuda(const Tensor& grad_out, const Tensor& a,
                                                const Tensor& b) {
  auto [grad_a, grad_b] = empty_gradients(grad_out, a, b);
  launch("matmul_backward", a, [&, &grad_a = grad_a, &grad_b = grad_b](cudaStream_t stream) {
    const cudaError_t error = matmul_launch(product(grad_a, grad_out, transposed(b)), stream);
    if (error != cudaSuccess) return error;
    return matmul_launch(product(grad_b, transposed(a), grad_out), stream);
  });
  return {grad_a, grad_b};
}

}  // namespace

CUDA_OPS(library) {
  library.op("matmul(Tensor a, Tensor b) -> Tensor", "(m,k),(k,n)->(m,n)")
      .dtypes(kFloating)
      .doc(R"(Matrix product a @ b, with broadcasting batch dims.

Shapes: a (..., M, K) and b (..., K, N) of any strides; the result (..., M, N) is contiguous. Its
batch dims are those that a's and b's broadcast to. K = 0 gives zeros.
Dtypes: float64, float32, float16 or bfloat16, the same for both. Sums run in float64 for float64
and in float32 for the others, without TF32, and are rounded once.
Errors: RuntimeError for fewer than two dims, a K that differs, another dtype, two dtypes, two
devices, or batch dims that do not broadcast.
Formula: out[m, n] = sum over k of a[m, k] * b[k, n].)")
      .cpu<matmul_cpu>()
      .cuda<matmul_cuda>();
  library
      .op("matmul_backward(Tensor grad_out, Tensor a, Tensor b) -> (Tensor grad_a, Tensor grad_b)",
          "(m,n),(m,k),(k,n)->(m,k),(k,n)")
      .dtypes(kFloating)
      .doc(R"(Gradients of matmul: grad_out @ b^T and a^T @ grad_out.

Shapes: grad_out (..., M, N), a (..., M, K), b (..., K, N); grad_a (..., M, K) and grad_b
(..., K, N) are contiguous and keep the broadcast batch dims. Where an input was broadcast its
gradient is the sum over those dims, which is left to the caller.
Dtypes: float64, float32, float16 or bfloat16, the same for all; sums as in matmul.
Errors: RuntimeError as in matmul.
Formula: Giles, https://people.maths.ox.ac.uk/gilesm/files/NA-08-01.pdf, section 2.2.2.)")
      .cpu<matmul_backward_cpu>()
      .cuda<matmul_backward_cuda>();
}
