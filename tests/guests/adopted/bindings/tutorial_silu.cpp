// tutorial_silu for PyTorch, from tutorial_silu.cpp and tutorial_silu.cu.
#include "binding.h"

using namespace cuda_ops;

cudaError_t tutorial_silu_launch(DType dtype, const void* x, void* y, int64_t n,
                                 cudaStream_t stream);

namespace {

constexpr DType kTypes[] = {DType::kFloat64, DType::kFloat32};

// Elementwise kernels walk memory. Where all inputs share one dense layout `out` has it too; else
// it is contiguous, and so is what this returns.
Tensor in_order_of(const Tensor& out, const Tensor& x) {
  return out.is_contiguous() ? contiguous(x, shape_of(out)) : x;
}

Tensor tutorial_silu_cpu(const Tensor& x) {
  const auto f = [](double x) { return x * sigmoid(x); };
  return elementwise_cpu(f, x);
}

Tensor tutorial_silu_cuda(const Tensor& x_) {
  Tensor y = empty_elementwise(x_);
  const Tensor x = in_order_of(y, x_);
  if (y.numel() == 0) return y;
  launch(x, [&](cudaStream_t stream) {
    return tutorial_silu_launch(dtype_of(x), x.const_data_ptr(), y.mutable_data_ptr(), x.numel(),
                                stream);
  });
  return y;
}

}  // namespace

CUDA_OPS(adopted, library) {
  // forward() of the guest.
  library.op("tutorial_silu(Tensor x) -> Tensor", "()->()")
      .dtypes(kTypes)
      .doc(R"(silu (CPU, CUDA))")
      .cpu<tutorial_silu_cpu>()
      .cuda<tutorial_silu_cuda>();
}
