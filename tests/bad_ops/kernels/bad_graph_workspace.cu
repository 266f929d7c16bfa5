// Class 10: works in memory that its binding keeps.
#include "raw.cuh"

using namespace cuda_ops;

cudaError_t bad_graph_workspace_launch(const Raw& problem, void* workspace, cudaStream_t stream) {
  if (problem.numel == 0) return cudaSuccess;
  return visit_raw(problem, [&](auto* x, auto* out) {
    auto* kept = static_cast<decltype(out)>(workspace);
    const unsigned blocks = blocks_for(problem.numel);
    copy_kernel<<<blocks, kThreads, 0, stream>>>(x, kept, problem.numel);
    copy_kernel<<<blocks, kThreads, 0, stream>>>(kept, out, problem.numel);
  });
}
