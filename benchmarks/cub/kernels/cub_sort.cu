// CUB's sorts as they come, to compare with: pairs of a key and an index that a
// kernel has to write first.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_segmented_sort.cuh>

#include "dtype.h"

using namespace cuda_ops;

namespace {

__global__ void number_kernel(int64_t* indices, int* starts, int64_t count, int64_t n) {
  const int64_t i = int64_t(blockIdx.x) * 256 + threadIdx.x;
  if (i >= count) return;
  indices[i] = i % n;
  if (i % n == 0) starts[i / n] = int(i);
  if (i == count - 1) starts[count / n] = int(count);
}

template <class T>
cudaError_t sort(const void* x, void* values, int64_t* indices, char* workspace, int64_t& bytes,
                 int64_t rows, int64_t n, bool descending, cudaStream_t stream) {
  const int64_t count = rows * n;
  auto* numbers = reinterpret_cast<int64_t*>(workspace);
  auto* starts = reinterpret_cast<int*>(workspace + count * 8);
  const int64_t used = (count * 8 + (rows + 1) * 4 + 255) / 256 * 256;
  void* temporary = workspace == nullptr ? nullptr : workspace + used;
  size_t temporary_bytes = workspace == nullptr ? 0 : size_t(bytes - used);
  if (workspace != nullptr) {
    number_kernel<<<unsigned((count + 255) / 256), 256, 0, stream>>>(numbers, starts, count, n);
  }
  const T* keys = static_cast<const T*>(x);
  T* sorted = static_cast<T*>(values);
  constexpr int kBits = int(8 * sizeof(T));
  const auto error = [&] {
    if (rows > 1 && descending) {
      return cub::DeviceSegmentedSort::StableSortPairsDescending(
          temporary, temporary_bytes, keys, sorted, numbers, indices, int(count), int(rows), starts,
          starts + 1, stream);
    }
    if (rows > 1) {
      return cub::DeviceSegmentedSort::StableSortPairs(temporary, temporary_bytes, keys, sorted,
                                                       numbers, indices, int(count), int(rows),
                                                       starts, starts + 1, stream);
    }
    if (descending) {
      return cub::DeviceRadixSort::SortPairsDescending(temporary, temporary_bytes, keys, sorted,
                                                       numbers, indices, count, 0, kBits, stream);
    }
    return cub::DeviceRadixSort::SortPairs(temporary, temporary_bytes, keys, sorted, numbers,
                                           indices, count, 0, kBits, stream);
  }();
  bytes = used + int64_t(temporary_bytes);
  return error;
}

}  // namespace

// Without a workspace, only says how many bytes it takes.
cudaError_t cub_sort_launch(DType dtype, const void* x, void* values, int64_t* indices,
                            char* workspace, int64_t& bytes, int64_t rows, int64_t n,
                            bool descending, cudaStream_t stream) {
  const auto run = [&](auto tag) {
    return sort<decltype(tag)>(x, values, indices, workspace, bytes, rows, n, descending, stream);
  };
  switch (dtype) {
    case DType::kFloat64: return run(double{});
    case DType::kFloat32: return run(float{});
    case DType::kFloat16: return run(__half{});
    case DType::kBFloat16: return run(__nv_bfloat16{});
    case DType::kInt64: return run(int64_t{});
    case DType::kInt32: return run(int32_t{});
    case DType::kUInt8: return run(uint8_t{});
    default: return cudaErrorInvalidValue;
  }
}
