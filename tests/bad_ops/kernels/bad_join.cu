// Class 8: a stream of its own that waits, and is not waited for.
#include "raw.cuh"

using namespace cuda_ops;

cudaError_t bad_join_launch(const Raw& problem, int64_t, cudaStream_t stream) {
  static cudaStream_t own = nullptr;
  static cudaEvent_t ready = nullptr;
  if (own == nullptr) {
    cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking);
    cudaEventCreateWithFlags(&ready, cudaEventDisableTiming);
  }
  cudaEventRecord(ready, stream);
  cudaStreamWaitEvent(own, ready);
  return visit_raw(problem, [&](auto* x, auto* out) {
    if (problem.numel > 0)
      copy_kernel<<<blocks_for(problem.numel), kThreads, 0, own>>>(x, out, problem.numel);
  });
}
