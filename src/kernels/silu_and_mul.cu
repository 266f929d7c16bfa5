// silu_and_mul(x) = silu(gate) * up for x = [gate, up] along the last dim: the
// middle of a SwiGLU layer. Three bytes of traffic per byte of output, where
// chunk, silu and a multiplication move five.
#include "elementwise.cuh"
#include "math.cuh"

using namespace cuda_ops;

namespace {

template <class Math>
struct SiluAndMul {
  template <class C>
  __device__ C operator()(C gate, C up) const {
    return gate * sigmoid<Math>(gate) * up;
  }
};

template <class Math>
struct SiluAndMulBackward {
  template <class C>
  __device__ Results<C, 2> operator()(C grad_out, C gate, C up) const {
    const C s = sigmoid<Math>(gate);
    return {grad_out * up * s * (1 + gate * (1 - s)), grad_out * gate * s};
  }
};

template <class Math>
struct SiluAndMulJvp {
  template <class C>
  __device__ C operator()(C gate, C up, C along_gate, C along_up) const {
    const C s = sigmoid<Math>(gate);
    return along_gate * up * s * (1 + gate * (1 - s)) + along_up * gate * s;
  }
};

}  // namespace

// -----------------------------------------------------------------------------

cudaError_t silu_and_mul_launch(const Strided<2>& problem, cudaStream_t stream) {
  return map_cuda<SiluAndMul>(problem, stream);
}

cudaError_t silu_and_mul_backward_launch(const Strided<3, 2>& problem, cudaStream_t stream) {
  return map_cuda<SiluAndMulBackward>(problem, stream);
}

cudaError_t silu_and_mul_jvp_launch(const Strided<4>& problem, cudaStream_t stream) {
  return map_cuda<SiluAndMulJvp>(problem, stream);
}
