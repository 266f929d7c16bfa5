// Which kernels of attention run.
#pragma once

#include "attention/attention_gradient.cuh"
#include "attention/attention_hopper.cuh"
#include "attention/attention_hopper_gradient.cuh"

namespace cuda_ops {

namespace detail {

// Calls body(constant) with 64, 128 or 256, the columns that rows of `dim` have in shared memory.
template <class Body>
cudaError_t visit_head_dim(int dim, Body&& body) {
  switch (attention_dim(dim)) {
    case 64: return body(std::integral_constant<int, 64>{});
    case 128: return body(std::integral_constant<int, 128>{});
    default: return body(std::integral_constant<int, 256>{});
  }
}

// `heads` counts a head once for each split of its keys.
template <class Kernel, class Problem>
cudaError_t launch_attention_kernel(Kernel kernel, const AttentionTile& tile, int64_t heads,
                                    int64_t rows, const Problem& problem, cudaStream_t stream) {
  const int64_t tiles = heads * ((rows + tile.rows() - 1) / tile.rows()) * tile.parts();
  if (tiles == 0) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, tile.shared_bytes());
  if (error != cudaSuccess) return error;
  // One dim for everything: y and z end at 65535. Blocks step over the rest.
  const int64_t grid = tiles < INT32_MAX ? tiles : INT32_MAX;
  kernel<<<unsigned(grid), tile.threads(), unsigned(tile.shared_bytes()), stream>>>(problem, tiles);
  return cudaGetLastError();
}

}  // namespace detail

inline cudaError_t launch_attention(const Attention& p, cudaStream_t stream) {
  if (current_device().capability < 80) return cudaErrorNoKernelImageForDevice;
  const int64_t rows = p.heads.numel * p.shape.queries;
  if (rows == 0) return cudaSuccess;
  return visit_floating(p.heads.dtype, [&](auto tag) {
    using T = decltype(tag);
    const auto run = [&](auto few) {
      return detail::visit_head_dim(p.shape.dim, [&](auto dim) {
        constexpr int kDim = decltype(dim)::value;
        constexpr bool kFew = decltype(few)::value;
        if constexpr (sizeof(T) == 2 && !kFew) {
          if (p.plan.hopper) return launch_attention_hopper<T, kDim>(p, stream);
        }
        return detail::launch_attention_kernel(
            attention_kernel<T, kDim, kFew>, attention_tile(sizeof(T), kDim, kFew),
            p.heads.numel * p.plan.splits, p.shape.queries, p, stream);
      });
    };
    const bool few = attention_few(p.shape.queries) && sizeof(T) < 8;  // which has one warp anyway
    const cudaError_t error =
        few ? run(std::bool_constant<(sizeof(T) < 8)>{}) : run(std::false_type{});
    if (error != cudaSuccess || p.plan.splits == 1) return error;
    const int64_t grid = rows < INT32_MAX ? rows : INT32_MAX;
    return launch_early(attention_merge_kernel<T>, unsigned(grid), kMergeThreads, 0, stream, p,
                        rows);
  });
}

inline cudaError_t launch_attention_gradient(const AttentionGradient& p, cudaStream_t stream) {
  if (current_device().capability < 80) return cudaErrorNoKernelImageForDevice;
  if (p.heads.numel == 0) return cudaSuccess;  // the copy engine describes no empty batch
  const int64_t tiles = p.heads.numel * ((p.shape.queries + kDeltaRows - 1) / kDeltaRows);
  return visit_floating(p.heads.dtype, [&](auto tag) {
    using T = decltype(tag);
    if (tiles > 0) {
      const int64_t grid = tiles < INT32_MAX ? tiles : INT32_MAX;
      attention_delta_kernel<T><<<unsigned(grid), kDeltaThreads, 0, stream>>>(p, tiles);
      const cudaError_t error = cudaGetLastError();
      if (error != cudaSuccess) return error;
    }
    return detail::visit_head_dim(p.shape.dim, [&](auto dim) {
      if constexpr (sizeof(T) == 2) {
        if (attention_fits_hopper_gradient(p, current_device())) {
          return launch_attention_hopper_gradient<T, decltype(dim)::value>(p, stream);
        }
      }
      constexpr AttentionTile kOfKeys = attention_gradient_tile(sizeof(T), dim.value, 2);
      constexpr AttentionTile kOfQueries = attention_gradient_tile(sizeof(T), dim.value, 1);
      const cudaError_t error =
          detail::launch_attention_kernel(attention_gradient_kernel<T, dim.value, true>, kOfKeys,
                                          p.heads.numel, p.shape.keys, p, stream);
      if (error != cudaSuccess) return error;
      return detail::launch_attention_kernel(attention_gradient_kernel<T, dim.value, false>,
                                             kOfQueries, p.heads.numel, p.shape.queries, p, stream);
    });
  });
}

}  // namespace cuda_ops
