// Rotary position embedding and its gradient, which turns back: bound by memory, x in and out.
#include "rotary/rotary.cuh"

using namespace cuda_ops;

cudaError_t rotary_embedding_launch(const Rotary& problem, cudaStream_t stream) {
  return launch_rotary(problem, stream);
}
