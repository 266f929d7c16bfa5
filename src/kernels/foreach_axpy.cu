// alpha * x + y for each x and y of two lists: bound by memory, x and y in and the result out.
#include "elementwise.cuh"
#include "foreach/foreach.cuh"

using namespace cuda_ops;

namespace {

struct Axpy {
  Scalar alpha;

  template <class C>
  __device__ C operator()(C x, C y) const {
    return alpha.as<C>() * x + y;
  }
};

}  // namespace

cudaError_t foreach_axpy_launch(const Flat<2>* flats, int64_t count, DType dtype, double alpha,
                                cudaStream_t stream) {
  return foreach_cuda(flats, count, dtype, stream, Axpy{alpha});
}
