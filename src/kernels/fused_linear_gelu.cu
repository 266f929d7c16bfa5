// gelu(x @ weight^T + bias) without a second pass over memory: bias and gelu are
// applied to the sums while they are in registers. The kernels are those of matmul.
#include "fused_linear_gelu.h"

#include "gelu.cuh"
#include "gemm.cuh"

using namespace cuda_ops;

namespace {

// What all epilogues begin with: the sum of one column and its bias.
template <class T>
struct Bias {
  const T* bias;  // of the columns, or laid out as out, or null
  bool as_out;

  template <class C>
  __device__ void add(C (&sums)[2], const Place& at) const {
    if (bias == nullptr) return;
    const T* of_pair = bias + (as_out ? at.offset : at.n);
    if (at.first) sums[0] += to_compute(of_pair[0]);
    if (at.second) sums[1] += to_compute(of_pair[1]);
  }
};

template <class T, bool kKeep>
struct BiasGelu : Bias<T> {
  static constexpr bool kSecond = kKeep;  // the sums before gelu

  template <class C>
  __device__ void operator()(C (&sums)[2], C (&aside)[2], const Place& at) const {
    this->add(sums, at);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (kKeep) aside[i] = sums[i];
      sums[i] = GeluApprox<MathFor<T>>{}(sums[i]);
    }
  }
};

// grad_out times the slope of gelu at the sums, which need not have been kept.
template <class T>
struct BiasGeluSlope : Bias<T> {
  static constexpr bool kSecond = false;
  const T* grad_out;  // laid out as out

  template <class C>
  __device__ void operator()(C (&sums)[2], C (&)[2], const Place& at) const {
    this->add(sums, at);
    const T* grad = grad_out + at.offset;
    if (at.first) sums[0] = GeluApproxBackward<MathFor<T>>{}(C(to_compute(grad[0])), sums[0]);
    if (at.second) sums[1] = GeluApproxBackward<MathFor<T>>{}(C(to_compute(grad[1])), sums[1]);
  }
};

}  // namespace

// -----------------------------------------------------------------------------

GemmPlan fused_linear_gelu_plan(const LinearGelu& p) { return current_plan<true>(p.product); }

cudaError_t fused_linear_gelu_launch(const LinearGelu& p, const GemmPlan& plan, void* workspace,
                                     cudaStream_t stream) {
  return visit_floating(p.product.batch.dtype, [&](auto tag) {
    using T = decltype(tag);
    const auto run = [&](const auto& epilogue, void* second) {
      return gemm<T, true>(p.product, plan, workspace, epilogue, second, stream);
    };
    const Bias<T> bias{static_cast<const T*>(p.bias), p.bias_as_out};
    if (p.grad_out != nullptr) {
      return run(BiasGeluSlope<T>{bias, static_cast<const T*>(p.grad_out)}, nullptr);
    }
    if (p.preactivation != nullptr) return run(BiasGelu<T, true>{bias}, p.preactivation);
    return run(BiasGelu<T, false>{bias}, nullptr);
  });
}
