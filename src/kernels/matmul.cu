// out = a @ b for one matrix or for a batch, any strides, no copies. The kernels
// are in utils/gemm_*.cuh, shared with what else multiplies matrices; gemm.h says
// which one runs.
#include "gemm.cuh"

using namespace cuda_ops;

cudaError_t matmul_launch(const Matmul& problem, cudaStream_t stream) {
  return visit_floating(problem.batch.dtype, [&](auto tag) {
    return gemm<decltype(tag)>(problem, PlainEpilogue{}, nullptr, stream);
  });
}
