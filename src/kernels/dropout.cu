// dropout(x) = x / (1 - p) or, with probability p, 0. Two bytes of traffic per byte of x. A mask is
// neither read nor written: four elements share a block of random words, which is made again for
// the gradient. That takes a thread about 25 instructions per element, so bfloat16 is near the
// limit of the arithmetic too.
#include "random.cuh"

using namespace cuda_ops;

namespace {

struct Dropout {
  Chance drop;
  Scalar scale;

  template <class C>
  __device__ C operator()(const Draw& draw, C x) const {
    return draw.is_below(drop) ? C(0) : x * scale.as<C>();
  }
};

}  // namespace

// -----------------------------------------------------------------------------

cudaError_t dropout_launch(const Strided<2>& problem, RandomKey key, double p,
                           cudaStream_t stream) {
  return map_random_cuda(problem, key, stream, Dropout{Chance(p), 1 / (1 - p)});
}
