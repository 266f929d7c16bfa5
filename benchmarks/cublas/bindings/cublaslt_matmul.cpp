// cublaslt_matmul(a, b, algorithm, tf32): a @ b of two matrices by cuBLASLt, with one of the
// algorithms that it suggests.
#include "cublaslt_matmul.h"

#include "binding.h"

using namespace cuda_ops;

cudaError_t cublaslt_matmul_launch(const CublasLtMatmul& problem, cudaStream_t stream);

namespace {

// What torch gives the library on Hopper.
constexpr int64_t kWorkspaceBytes = int64_t(32) << 20;

bool is_transposed(const char* name, const Tensor& x) {
  if (x.dim() != 2) refuse(name, "a matrix", shape_name(x));
  if (x.is_contiguous()) return false;
  if (x.stride(0) != 1 || x.stride(1) != x.size(0)) {
    refuse(name, "a contiguous matrix or the transpose of one", "other strides");
  }
  return true;
}

Tensor cublaslt_matmul_cuda(const Tensor& a, const Tensor& b, int64_t algorithm, bool tf32) {
  const bool a_transposed = is_transposed("a", a), b_transposed = is_transposed("b", b);
  if (a.size(1) != b.size(0)) refuse("b", "as many rows as a has columns", shape_name(b));
  const int64_t m = a.size(0), n = b.size(1);
  Tensor out = empty({m, n}, a);
  const Tensor workspace = empty({kWorkspaceBytes}, DType::kUInt8, a);
  const CublasLtMatmul problem = {dtype_of(a),
                                  a.const_data_ptr(),
                                  b.const_data_ptr(),
                                  out.mutable_data_ptr(),
                                  m,
                                  n,
                                  a.size(1),
                                  a_transposed,
                                  b_transposed,
                                  tf32,
                                  int(algorithm),
                                  workspace.mutable_data_ptr(),
                                  size_t(kWorkspaceBytes)};
  launch(a, [&](cudaStream_t stream) { return cublaslt_matmul_launch(problem, stream); });
  return out;
}

}  // namespace

CUDA_OPS(library) {
  library.op("cublaslt_matmul(Tensor a, Tensor b, int algorithm=0, bool tf32=False) -> Tensor", "")
      .dtypes(kFloating)
      .cuda<cublaslt_matmul_cuda>();
}
