// out = a @ b for one matrix or for a batch, any strides. The kernels are in utils/gemm, shared
// with other operators that multiply matrices; gemm.h chooses one and says whether operands are
// copied first.
#include "gemm/gemm.cuh"

using namespace cuda_ops;

GemmPlan matmul_plan(const Matmul& problem) { return current_plan(problem); }

cudaError_t matmul_launch(const Matmul& problem, const GemmPlan& plan, void* workspace,
                          cudaStream_t stream) {
  return visit_floating(problem.batch.dtype, [&](auto tag) {
    return gemm<decltype(tag)>(problem, plan, workspace, PlainEpilogue{}, nullptr, stream);
  });
}
