// Class 15: its weights are in memory that was freed, and may be that of the result.
#include "weighted.cuh"

using namespace cuda_ops;

cudaError_t bad_freed_weight_launch(const Raw& problem, const void* weight, int64_t n,
                                    cudaStream_t stream) {
  return weighted(problem, weight, n, stream);
}
