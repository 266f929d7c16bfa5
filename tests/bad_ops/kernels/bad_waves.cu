// Class 14: as many blocks as run at once, and no loop over what is left.
#include <algorithm>

#include "raw.cuh"

using namespace cuda_ops;

cudaError_t bad_waves_launch(const Raw& problem, int64_t, cudaStream_t stream) {
  if (problem.numel == 0) return cudaSuccess;
  int processors = 0;
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0);
  const unsigned most = unsigned(processors) * (2048 / kThreads);
  return visit_raw(problem, [&](auto* x, auto* out) {
    const unsigned blocks = std::min(blocks_for(problem.numel), most);
    copy_kernel<<<blocks, kThreads, 0, stream>>>(x, out, problem.numel);
  });
}
