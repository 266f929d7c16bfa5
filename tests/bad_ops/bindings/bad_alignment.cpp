// Class 11: the kernel reads pairs wherever the number of elements is even.
#include "bad.h"

using namespace cuda_ops;

cudaError_t bad_alignment_launch(const Raw& problem, cudaStream_t stream);

namespace {

Tensor bad_alignment_cpu(const Tensor& x) { return copied(x); }

Tensor bad_alignment_cuda(const Tensor& x) { return flattened(x, bad_alignment_launch); }

}  // namespace

CUDA_OPS(library) {
  library.op("bad_alignment(Tensor x) -> Tensor", "()->()")
      .dtypes(kWide)
      .cpu<bad_alignment_cpu>()
      .cuda<bad_alignment_cuda>();
}
