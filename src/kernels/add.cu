// add(a, b) = a + b. Three bytes of traffic per byte of output; an input that
// broadcasts is read once and then found in a cache.
#include "elementwise.cuh"

using namespace cuda_ops;

namespace {

struct Add {
  template <class C>
  __device__ C operator()(C a, C b) const {
    return a + b;
  }
};

}  // namespace

// -----------------------------------------------------------------------------

cudaError_t add_launch(const Strided<2>& problem, cudaStream_t stream) {
  return map_cuda(problem, stream, Add{});
}
