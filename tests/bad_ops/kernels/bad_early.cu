// Class 2: starts before the end of the kernel in front of it, and does not wait for it.
#include "raw.cuh"

using namespace cuda_ops;

cudaError_t bad_early_launch(const Raw& problem, int64_t, cudaStream_t stream) {
  if (problem.numel == 0) return cudaSuccess;
  return visit_raw(problem, [&](auto* x, auto* out) {
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = blocks_for(problem.numel);
    config.blockDim = kThreads;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = 1;
    using T = std::remove_pointer_t<decltype(out)>;
    cudaLaunchKernelEx(&config, copy_kernel<T>, x, out, problem.numel);
  });
}
