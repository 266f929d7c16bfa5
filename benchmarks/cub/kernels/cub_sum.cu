// Sums as one call of CUB each: what sum_rows and reduce_sum are compared with.
#include "cub_sum.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cub/device/device_reduce.cuh>
#include <cub/device/device_segmented_reduce.cuh>
#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>

using namespace cuda_ops;

namespace {

// Halves are added as float and rounded once, as ours are.
template <class C>
struct Plus {
  __host__ __device__ C operator()(C a, C b) const { return a + b; }
};

struct Start {
  int64_t length;
  __host__ __device__ int64_t operator()(int64_t row) const { return row * length; }
};

template <class T, class C>
cudaError_t reduce(CubSum& p, cudaStream_t stream) {
  const T* in = static_cast<const T*>(p.data);
  T* out = static_cast<T*>(p.out);
  if (p.rows < 0) {
    return cub::DeviceReduce::Reduce(p.workspace, p.workspace_bytes, in, out, p.n, Plus<C>{}, C(0),
                                     stream);
  }
  const auto starts =
      thrust::make_transform_iterator(thrust::counting_iterator<int64_t>(0), Start{p.n});
  return cub::DeviceSegmentedReduce::Reduce(p.workspace, p.workspace_bytes, in, out, p.rows, starts,
                                            starts + 1, Plus<C>{}, C(0), stream);
}

}  // namespace

// -----------------------------------------------------------------------------

cudaError_t cub_sum_launch(CubSum& p, cudaStream_t stream) {
  switch (p.dtype) {
    case DType::kFloat64: return reduce<double, double>(p, stream);
    case DType::kFloat32: return reduce<float, float>(p, stream);
    case DType::kFloat16: return reduce<__half, float>(p, stream);
    case DType::kBFloat16: return reduce<__nv_bfloat16, float>(p, stream);
    default: return cudaErrorInvalidValue;
  }
}
