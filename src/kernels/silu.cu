// silu(x) = x * sigmoid(x), and its gradient. Two bytes of traffic per byte of
// x forward, three backward; the arithmetic must stay below that, which on an
// H200 leaves about 28 instructions per bfloat16 element.
#include "elementwise.cuh"

using namespace cuda_ops;

namespace {

// 1 ulp over the whole range, denominators near 2^127 included (PTX ISA,
// rcp.approx.f32). An IEEE division costs three times as much, and __fdividef
// returns 0 from 2^126 on, which is x = -87.3.
__device__ float reciprocal(float value) {
  float result;
  asm("rcp.approx.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}
__device__ double reciprocal(double value) { return 1 / value; }

template <class C>
__device__ C sigmoid(C x) {
  return reciprocal(1 + exp(-x));  // exp(float) is expf: 1 ulp, and inf where it overflows
}

struct Silu {
  template <class C>
  __device__ C operator()(C x) const {
    return x * sigmoid(x);
  }
};

struct SiluBackward {
  template <class C>
  __device__ C operator()(C grad_out, C x) const {
    const C s = sigmoid(x);
    return grad_out * s * (1 + x * (1 - s));
  }
};

}  // namespace

// -----------------------------------------------------------------------------

cudaError_t silu_launch(const Strided<1>& problem, cudaStream_t stream) {
  return map_cuda(problem, stream, Silu{});
}

cudaError_t silu_backward_launch(const Strided<2>& problem, cudaStream_t stream) {
  return map_cuda(problem, stream, SiluBackward{});
}
