// Class 10: the launcher waits for its kernel.
#include "bad.h"

using namespace cuda_ops;

cudaError_t bad_graphs_launch(const Raw& problem, cudaStream_t stream);

namespace {

Tensor bad_graphs_cpu(const Tensor& x) { return copied(x); }

Tensor bad_graphs_cuda(const Tensor& x) { return flattened(x, bad_graphs_launch); }

}  // namespace

CUDA_OPS(library) {
  library.op("bad_graphs(Tensor x) -> Tensor", "()->()")
      .dtypes(kWide)
      .cpu<bad_graphs_cpu>()
      .cuda<bad_graphs_cuda>();
}
