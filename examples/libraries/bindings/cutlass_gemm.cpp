// cutlass_gemm(a, b): a product by a template of CUTLASS, to show how a pair includes the headers
// of a package.

// cuda_ops.build: include_dirs nvidia-cutlass:cutlass_library/source/include
#include "product.h"

using namespace cuda_ops;

cudaError_t cutlass_gemm_launch(const float* a, const float* b, float* out, int64_t batch, int m,
                                int n, int k, cudaStream_t stream);

namespace {

constexpr DType kTaken[] = {DType::kFloat32};

Tensor product_cuda(const Tensor& a, const Tensor& b) {
  const Tensor x = contiguous(a), y = contiguous(b), out = empty_product(a, b);
  const Product p = product_of(a, b);
  for (const int64_t size : {p.m, p.n, p.k}) {
    if (size > INT32_MAX) refuse("a", "dims below 2^31, as CUTLASS counts", std::to_string(size));
  }
  launch(a, [&](cudaStream_t stream) {
    return cutlass_gemm_launch(static_cast<const float*>(x.const_data_ptr()),
                               static_cast<const float*>(y.const_data_ptr()),
                               static_cast<float*>(out.mutable_data_ptr()), p.batch, int(p.m),
                               int(p.n), int(p.k), stream);
  });
  return out;
}

}  // namespace

CUDA_OPS(library) {
  library.op("cutlass_gemm(Tensor a, Tensor b) -> Tensor", "(m,k),(k,n)->(m,n)")
      .dtypes(kTaken)
      .broadcast()
      .doc(R"(The product of matrices, by CUTLASS.

Shapes: a (..., M, K), b (..., K, N), the result (..., M, N); loop dims broadcast. M, N and K are
below 2^31.
Dtypes: float32. Sums run in float32, on a CPU in float64.
Errors: RuntimeError for shapes that do not fit, or any other dtype.
Formula: out = a b, as torch.matmul(a, b).)")
      .cpu<product_cpu>()
      .cuda<product_cuda>();
}
