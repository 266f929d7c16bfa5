// Attention and its gradient: bound by arithmetic, 4 dim FLOPs a query and key, and by powers of
// two, one a query and key.
#include "attention/attention.cuh"

using namespace cuda_ops;

AttentionSplit attention_split(const Attention& problem) {
  return attention_split(problem.shape, problem.heads.numel, size_of(problem.heads.dtype),
                         current_device());
}

cudaError_t attention_launch(const Attention& problem, cudaStream_t stream) {
  return launch_attention(problem, stream);
}

cudaError_t attention_backward_launch(const AttentionGradient& problem, cudaStream_t stream) {
  return launch_attention_gradient(problem, stream);
}
