// gelu(x @ weight^T + bias) without a second pass over memory: bias and gelu are
// applied to the sums while they are in registers. The kernels are those of matmul.
#include "gemm/fused_linear_gelu.h"

#include "gelu.cuh"
#include "gemm/gemm.cuh"

using namespace cuda_ops;

namespace {

template <class T>
struct Bias {
  const T* bias;  // of the columns, or laid out as out, or null
  bool as_out;

  using Columns = Pair<T>;
  using Inputs = Pair<T>;
  __device__ Columns columns(int64_t n, int count) const {
    if (bias == nullptr || as_out) return {};
    return Columns::load(bias + n, count > 0, count > 1);
  }

  __device__ bool needs_place() const { return as_out; }
  __device__ Inputs inputs(const Columns& columns) const { return columns; }
  __device__ Inputs inputs(const Columns& columns, const Place& at) const {
    return as_out ? Inputs::load(bias + at.offset, at.first, at.second) : columns;
  }

  template <class C>
  __device__ static void add(C (&sums)[2], const Pair<T>& bias) {
    C both[2];
    bias.widen(both);
    sums[0] += both[0];
    sums[1] += both[1];
  }
};

template <class T, bool kKeep>
struct BiasGelu : Bias<T> {
  static constexpr bool kSecond = kKeep;  // the sums before gelu

  template <class C>
  __device__ void operator()(C (&sums)[2], C (&aside)[2], const Pair<T>& bias) const {
    this->add(sums, bias);
    if constexpr (kKeep) aside[0] = sums[0], aside[1] = sums[1];
    gelu_approx<MathFor<T>>(sums);
  }
};

// Multiplies grad_out by the slope of gelu at the sums, which need not have been kept.
template <class T>
struct BiasGeluSlope : Bias<T> {
  static constexpr bool kSecond = false;
  const T* grad_out;  // laid out as out

  struct Inputs {
    Pair<T> bias, grads;
  };
  __device__ bool needs_place() const { return true; }
  __device__ Inputs inputs(const Pair<T>& columns) const { return {columns, {}}; }
  __device__ Inputs inputs(const Pair<T>& columns, const Place& at) const {
    return {Bias<T>::inputs(columns, at), Pair<T>::load(grad_out + at.offset, at.first, at.second)};
  }

  template <class C>
  __device__ void operator()(C (&sums)[2], C (&)[2], const Inputs& inputs) const {
    C grads[2];
    inputs.grads.widen(grads);
    this->add(sums, inputs.bias);
#pragma unroll
    for (int i = 0; i < 2; ++i) sums[i] = GeluApproxBackward<MathFor<T>>{}(grads[i], sums[i]);
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
