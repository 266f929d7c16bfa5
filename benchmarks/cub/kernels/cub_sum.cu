// Sums as one call of CUB each: what sum_rows and reduce_sum are compared with.
#include "cub_sum.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cub/device/device_reduce.cuh>
#include <cub/device/device_segmented_reduce.cuh>
#include <cub/version.cuh>
#include <cuda/std/functional>
#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>

#include <limits>
#include <type_traits>

using namespace cuda_ops;

namespace {

// From 3.2 on, CUB takes the length of equal segments: it then gives a short one to a thread or a
// warp. Before, each segment takes a block, whatever its length.
constexpr bool kHasFixedSize = CUB_MAJOR_VERSION * 100 + CUB_MINOR_VERSION >= 302;

struct Start {
  int64_t length;
  __host__ __device__ int64_t operator()(int64_t row) const { return row * length; }
};

template <class T, class C>
cudaError_t sum_of_all(CubSum& p, const T* in, T* out, cudaStream_t stream) {
  if constexpr (std::is_same_v<T, C>) {
    return cub::DeviceReduce::Sum(p.workspace, p.workspace_bytes, in, out, p.n, stream);
  } else {
    // Sum would add halves as halves; ours are added as float and rounded once.
    return cub::DeviceReduce::Reduce(p.workspace, p.workspace_bytes, in, out, p.n,
                                     ::cuda::std::plus<C>{}, C(0), stream);
  }
}

// A template, so that a CUB without the overload never sees the call.
template <bool kFixed, class T, class C>
cudaError_t sum_of_rows(CubSum& p, const T* in, T* out, C zero, cudaStream_t stream) {
  if constexpr (kFixed) {
    if (p.n <= std::numeric_limits<int>::max()) {
      return cub::DeviceSegmentedReduce::Reduce(p.workspace, p.workspace_bytes, in, out, p.rows,
                                                int(p.n), ::cuda::std::plus<C>{}, zero, stream);
    }
  }
  const auto starts =
      thrust::make_transform_iterator(thrust::counting_iterator<int64_t>(0), Start{p.n});
  return cub::DeviceSegmentedReduce::Reduce(p.workspace, p.workspace_bytes, in, out, p.rows, starts,
                                            starts + 1, ::cuda::std::plus<C>{}, zero, stream);
}

template <class T, class C>
cudaError_t reduce(CubSum& p, cudaStream_t stream) {
  const T* in = static_cast<const T*>(p.data);
  T* out = static_cast<T*>(p.out);
  if (p.rows == 1) return sum_of_all<T, C>(p, in, out, stream);
  return sum_of_rows<kHasFixedSize>(p, in, out, C(0), stream);
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
