// matmul(a, b) over broadcasting batch dims, and its gradients.
#include "by_torch.h"
#include "gemm/matmul_binding.h"

using namespace cuda_ops;

GemmPlan matmul_plan(const Matmul& problem);
cudaError_t matmul_launch(const Matmul& problem, const GemmPlan& plan, void* workspace,
                          cudaStream_t stream);

namespace {

Tensor empty_matrices(std::vector<int64_t> shape, int64_t rows, int64_t cols, const Tensor& like) {
  shape.insert(shape.end(), {rows, cols});
  return empty(shape, like);
}

Tensor empty_product(const Tensor& a, const Tensor& b) {
  const auto batch = broadcast_shape({a, b}, 2);
  check_batch(a.dim() < b.dim() ? "b" : "a", a.dim() < b.dim() ? b : a, batch);
  return empty_matrices(batch, Matrix(a).rows, Matrix(b).cols, a);
}

std::tuple<Tensor, Tensor> empty_gradients(const Tensor& grad_out, const Tensor& a,
                                           const Tensor& b) {
  const auto batch = broadcast_shape({grad_out, a, b}, 2);
  check_batch("grad_out", grad_out, batch);
  return {empty_matrices(batch, Matrix(a).rows, Matrix(a).cols, a),
          empty_matrices(batch, Matrix(b).rows, Matrix(b).cols, b)};
}

// --- CPU ----------------------------------------------------------------------

// A CPU is exact in every precision; each operator has a function of its own.
template <Precision kPrecision>
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

// Turns gradients off: with `out`, aten::matmul refuses arguments that want some, even in a call
// that autograd has seen already.
class WithoutGradients {
 public:
  WithoutGradients() { aoti_torch_grad_mode_set_enabled(false); }
  ~WithoutGradients() { aoti_torch_grad_mode_set_enabled(before_); }
  WithoutGradients(const WithoutGradients&) = delete;
  WithoutGradients& operator=(const WithoutGradients&) = delete;

 private:
  const bool before_ = aoti_torch_grad_mode_is_enabled();
};

Tensor product_by_torch(const Tensor& a, const Tensor& b, const Tensor& out) {
  const WithoutGradients guard;
  return call<Tensor>("aten::matmul", "out", a, b, out);
}

template <Precision kPrecision>
Tensor matmul_by_torch(const Tensor& a, const Tensor& b) {
  return product_by_torch(a, b, empty_product(a, b));
}

Tensor flipped(const Tensor& x) {
  return call<Tensor>("aten::transpose", "int", x, int64_t(-2), int64_t(-1));
}

// One gradient; grad_out is expanded to its batch, which an argument may have brought alone.
Tensor gradient_by_torch(const Tensor& out, const Tensor& grad_out, const Tensor& other,
                         bool from_left) {
  auto shape = shape_of(grad_out), batch = shape_of(out);
  std::copy(shape.end() - 2, shape.end(), batch.end() - 2);
  const Tensor whole = call<Tensor>("aten::expand", "", grad_out, batch, false);
  return from_left ? product_by_torch(other, whole, out) : product_by_torch(whole, other, out);
}

std::tuple<Tensor, Tensor> matmul_backward_by_torch(const Tensor& grad_out, const Tensor& a,
                                                    const Tensor& b) {
  const auto [grad_a, grad_b] = empty_gradients(grad_out, a, b);
  return {gradient_by_torch(grad_a, grad_out, flipped(b), false),
          gradient_by_torch(grad_b, grad_out, flipped(a), true)};
}

// --- CUDA ---------------------------------------------------------------------

cudaError_t multiply_cuda(const Tensor& like, const Matmul& p, cudaStream_t stream) {
  const GemmPlan plan = matmul_plan(p);
  return with_workspace(like, plan,
                        [&](void* workspace) { return matmul_launch(p, plan, workspace, stream); });
}

template <Precision kPrecision>
Tensor matmul_cuda(const Tensor& a, const Tensor& b) {
  Tensor out = empty_product(a, b);
  launch(a, [&](cudaStream_t stream) {
    return multiply_cuda(a, product(out, a, b, kPrecision), stream);
  });
  return out;
}

std::tuple<Tensor, Tensor> matmul_backward_cuda(const Tensor& grad_out, const Tensor& a,
                                                const Tensor& b) {
  auto [grad_a, grad_b] = empty_gradients(grad_out, a, b);
  launch(a, [&, &grad_a = grad_a, &grad_b = grad_b](cudaStream_t stream) {
    const cudaError_t error = multiply_cuda(a, product(grad_a, grad_out, transposed(b)), stream);
    if (error != cudaSuccess) return error;
    return multiply_cuda(a, product(grad_b, transposed(a), grad_out), stream);
  });
  return {grad_a, grad_b};
}

}  // namespace

constexpr DType kFloat32Only[] = {DType::kFloat32};

CUDA_OPS(library) {
  library.op("matmul(Tensor a, Tensor b) -> Tensor", "(m,k),(k,n)->(m,n)")
      .dtypes(kFloating)
      .linear("a")
      .linear("b")
      .doc(R"(Matrix product a @ b, with broadcasting batch dims.

Shapes: a (..., M, K) and b (..., K, N) of any strides; the result (..., M, N) is contiguous. Batch
dims broadcast; the result may have at most 16 that are not 1. K = 0 gives zeros.
Dtypes: float64, float32, float16 or bfloat16, the same for both. Sums run in float64 for float64
and in float32 for the others, without TF32, and are rounded once.
Memory: on Hopper GPUs, during the call, a copy of each 16-bit input that is neither K-major nor
line-major with rows at multiples of 16 bytes, if copying it makes the call faster.
Errors: RuntimeError for fewer than two dims, different sizes of K, any other dtype, mixed dtypes or
devices, or batch dims that do not broadcast.
Formula: out[m, n] = sum over k of a[m, k] * b[k, n].)")
      .cpu<matmul_cpu<Precision::kIeee>, matmul_by_torch<Precision::kIeee>>()
      .cuda<matmul_cuda<Precision::kIeee>>();
  library.op("matmul_tf32(Tensor a, Tensor b) -> Tensor", "(m,k),(k,n)->(m,n)")
      .dtypes(kFloat32Only)
      .linear("a")
      .linear("b")
      .doc(R"(matmul of float32 on tensor cores: rounds factors to tf32 (10 bits), sums in float32.

matmul calls it for precision="tf32".

Shapes: a (..., M, K), b (..., K, N); the result (..., M, N) is contiguous.
Dtypes: float32.
Memory: on Hopper GPUs, during the call, a copy of each input that is not K-major with rows at
multiples of 16 bytes, if copying it makes the call faster.
Errors: RuntimeError as in matmul.
Formula: as in matmul.)")
      .cpu<matmul_cpu<Precision::kTF32>, matmul_by_torch<Precision::kTF32>>()
      .cuda<matmul_cuda<Precision::kTF32>>();
  library.op("matmul_tf32x3(Tensor a, Tensor b) -> Tensor", "(m,k),(k,n)->(m,n)")
      .dtypes(kFloat32Only)
      .linear("a")
      .linear("b")
      .doc(
          R"(matmul of float32 on tensor cores: splits each factor in two tf32, sums three products.

matmul calls it for precision="tf32x3".

Shapes: a (..., M, K), b (..., K, N); the result (..., M, N) is contiguous.
Dtypes: float32.
Memory: on Hopper GPUs, during the call, twice the size of both inputs unless they are small.
Errors: RuntimeError as in matmul.
Formula: (a1 + a2) @ (b1 + b2) without a2 @ b2, where a1 is a rounded to tf32 and a2 is the rest.)")
      .cpu<matmul_cpu<Precision::kTF32x3>, matmul_by_torch<Precision::kTF32x3>>()
      .cuda<matmul_cuda<Precision::kTF32x3>>();
  library
      .op("matmul_backward(Tensor grad_out, Tensor a, Tensor b) -> (Tensor grad_a, Tensor grad_b)",
          "(m,n),(m,k),(k,n)->(m,k),(k,n)")
      .dtypes(kFloating)
      .doc(R"(Gradients of matmul: grad_out @ b^T and a^T @ grad_out.

Shapes: grad_out (..., M, N), a (..., M, K), b (..., K, N); grad_a (..., M, K) and grad_b (..., K,
N) are contiguous and keep the broadcast batch dims. The caller sums over the dims along which an
input was broadcast.
Dtypes: float64, float32, float16 or bfloat16, the same for all; sums as in matmul.
Memory: copies as in matmul, for one product at a time.
Errors: RuntimeError as in matmul.
Formula: Giles, https://people.maths.ox.ac.uk/gilesm/files/NA-08-01.pdf, section 2.2.2.)")
      .cpu<matmul_backward_cpu, matmul_backward_by_torch>()
      .cuda<matmul_backward_cuda>();
}
