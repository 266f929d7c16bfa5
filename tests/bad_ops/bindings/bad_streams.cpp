// Class 8: the CUDA kernel ignores the current stream.
#include "bad.h"

using namespace cuda_ops;

cudaError_t bad_streams_launch(const Raw& problem, cudaStream_t stream);

namespace {

Tensor bad_streams_cpu(const Tensor& x) { return copied(x); }

Tensor bad_streams_cuda(const Tensor& x) { return flattened(x, bad_streams_launch); }

}  // namespace

CUDA_OPS(library) {
  library.op("bad_streams(Tensor x) -> Tensor", "()->()")
      .dtypes(kWide)
      .cpu<bad_streams_cpu>()
      .cuda<bad_streams_cuda>();
}
