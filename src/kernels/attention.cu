// Attention and its gradient: bound by arithmetic, 4 dim FLOPs a query and key, and by powers of
// two, one a query and key.
#include "attention/attention_launch.cuh"

using namespace cuda_ops;

AttentionPlan attention_plan(const Attention& problem) {
  return attention_plan(problem, current_device());
}

cudaError_t attention_launch(const Attention& problem, cudaStream_t stream) {
  return launch_attention(problem, stream);
}

cudaError_t attention_backward_launch(const AttentionGradient& problem, cudaStream_t stream) {
  return launch_attention_gradient(problem, stream);
}
