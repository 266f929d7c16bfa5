// leaky_clip(x) = min(x < 0 ? slope * x : x, limit), and its gradient. One read
// and one write per element, where leaky_relu and clamp would make two of each.
#include "elementwise.cuh"

using namespace cuda_ops;

namespace {

// Comparisons with NaN are false in both, so a NaN in x passes through. One in limit is asked for.
struct LeakyClip {
  double slope, limit;

  template <class C>
  __device__ C operator()(C x) const {
    const C leaky = x < 0 ? C(slope) * x : x;
    return leaky > C(limit) || limit != limit ? C(limit) : leaky;
  }
};

struct LeakyClipBackward {
  double slope, limit;

  template <class C>
  __device__ C operator()(C grad_out, C x) const {
    const C leaky = x < 0 ? C(slope) * x : x;
    if (leaky > C(limit)) return C(0);
    return x <= 0 ? C(slope) * grad_out : grad_out;
  }
};

}  // namespace

// -----------------------------------------------------------------------------

cudaError_t leaky_clip_launch(const Strided<1>& problem, double slope, double limit,
                              cudaStream_t stream) {
  return map_cuda(problem, stream, LeakyClip{slope, limit});
}

cudaError_t leaky_clip_backward_launch(const Strided<2>& problem, double slope, double limit,
                                       cudaStream_t stream) {
  return map_cuda(problem, stream, LeakyClipBackward{slope, limit});
}
