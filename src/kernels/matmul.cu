// out = a @ b for one matrix or for a batch, any strides. The kernels are in
// utils/gemm_*.cuh, shared with what else multiplies matrices; gemm.h says which one
// runs, and whether operands are copied before it.
#include "gemm/gemm.cuh"

using namespace cuda_ops;

GemmPlan matmul_plan(const Matmul& problem) { return current_plan(problem); }

cudaError_t matmul_launch(const Matmul& problem, const GemmPlan& plan, void* workspace,
                          cudaStream_t stream) {
  return visit_floating(problem.batch.dtype, [&](auto tag) {
    return gemm<decltype(tag)>(problem, plan, workspace, PlainEpilogue{}, nullptr, stream);
  });
}
