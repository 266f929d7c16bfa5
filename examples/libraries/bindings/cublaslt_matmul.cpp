// cublaslt_matmul(a, b): a product by cuBLASLt, to show how a pair links with a library.

// cuda_ops.build: libraries cublasLt
#include "product.h"

using namespace cuda_ops;

cudaError_t cublaslt_matmul_launch(const void* a, const void* b, void* out, int64_t batch,
                                   int64_t m, int64_t n, int64_t k, DType dtype,
                                   cudaStream_t stream);

namespace {

constexpr DType kTaken[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

Tensor product_cuda(const Tensor& a, const Tensor& b) {
  const Tensor x = contiguous(a), y = contiguous(b), out = empty_product(a, b);
  const Product p = product_of(a, b);
  launch(a, [&](cudaStream_t stream) {
    return cublaslt_matmul_launch(x.const_data_ptr(), y.const_data_ptr(), out.mutable_data_ptr(),
                                  p.batch, p.m, p.n, p.k, dtype_of(a), stream);
  });
  return out;
}

}  // namespace

CUDA_OPS(library) {
  library.op("cublaslt_matmul(Tensor a, Tensor b) -> Tensor", "(m,k),(k,n)->(m,n)")
      .dtypes(kTaken)
      .broadcast()
      .doc(R"(The product of matrices, by cuBLASLt.

Shapes: a (..., M, K), b (..., K, N), the result (..., M, N); loop dims broadcast.
Dtypes: float32, float16 or bfloat16, the same for both. Sums run in float32, on a CPU in float64.
Errors: RuntimeError for shapes that do not fit, or any other dtype.
Formula: out = a b, as torch.matmul(a, b).)")
      .cpu<product_cpu>()
      .cuda<product_cuda>();
}
