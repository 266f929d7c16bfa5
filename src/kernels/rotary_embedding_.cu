// Rotary position embedding where x lies: bound by memory, what is turned in and out.
#include "rotary/rotary.cuh"

using namespace cuda_ops;

cudaError_t rotary_embedding_in_place_launch(const Rotary& problem, cudaStream_t stream) {
  return launch_rotary(problem, stream);
}
