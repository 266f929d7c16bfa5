// The bulk tensor copy engine (TMA) of sm_90: boxes of a matrix between global
// and shared memory, one instruction by one thread, strides and borders handled
// by the hardware. Elements outside of the tensor are read as 0 and not written.
//
// A tensor here has three dims: x (elements side by side in memory), y, and z
// (the batch), or five, with two more of batches. A box is `box_x` by `box_y` of one
// z. box_x spans 128 bytes, and rows land in shared memory swizzled, so that eight
// rows of one 16-byte column hit all 32 banks:
//
//   byte of shared memory = row * 128 + ((chunk ^ (row % 8)) * 16), chunk = x / 16 bytes
//
// That is the layout that wgmma.cuh's descriptors name. It needs the box to
// start at a multiple of 1024 bytes.
#pragma once

#include <cuda.h>  // types alone; nothing links against libcuda
#include <cuda_runtime.h>

#include "ptx/mbarrier.cuh"

namespace cuda_ops {

using TensorMap = CUtensorMap;

constexpr int kSwizzleBytes = 128;

// --- host ---------------------------------------------------------------------

// Describes `data` to the copy engine: sizes in elements, strides in bytes, that of x left out.
// Pointer and strides are multiples of 16, strides are below 2^40, sizes at most
// 2^32; `box_y` is at most 256. The L2 cache gets `fetched` bytes around those that are read. The
// runtime finds this function of the driver, so that a library that holds it loads where there is
// no driver.
template <int kDims>
cudaError_t tensor_map(TensorMap& map, CUtensorMapDataType type, int element_bytes,
                       const void* data, const int64_t (&sizes)[kDims],
                       const int64_t (&strides)[kDims - 1], int box_y,
                       CUtensorMapL2promotion fetched = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  static_assert(kDims == 3 || kDims == 5, "as there are loads for");
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found,
                                                               12000, cudaEnableDefault, &result);
    return error == cudaSuccess ? reinterpret_cast<Encode>(found) : nullptr;
  }();
  if (encode == nullptr) return cudaErrorNotSupported;
  cuuint64_t of_dims[kDims], steps_of_dims[kDims - 1];
  cuuint32_t box[kDims], steps[kDims];
  for (int d = 0; d < kDims; ++d) {
    of_dims[d] = cuuint64_t(sizes[d]);
    if (d > 0) steps_of_dims[d - 1] = cuuint64_t(strides[d - 1]);
    box[d] = cuuint32_t(d == 0 ? kSwizzleBytes / element_bytes : d == 1 ? box_y : 1);
    steps[d] = 1;
  }
  const auto encoded = [&] {
    return encode(&map, type, kDims, const_cast<void*>(data), of_dims, steps_of_dims, box, steps,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, fetched,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult error = encoded();
  if (error == CUDA_ERROR_INVALID_CONTEXT) {
    // The first call of a thread, for example in a backward pass: unlike the runtime's functions,
    // the driver's do not make the device's context current.
    int device = 0;
    cudaGetDevice(&device);
    cudaSetDevice(device);
    error = encoded();
  }
  return static_cast<cudaError_t>(error);  // the same numbers
}

inline cudaError_t tensor_map(TensorMap& map, CUtensorMapDataType type, int element_bytes,
                              const void* data, int64_t x, int64_t y, int64_t z, int64_t y_stride,
                              int64_t z_stride, int box_y,
                              CUtensorMapL2promotion fetched = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  return tensor_map<3>(map, type, element_bytes, data, {x, y, z}, {y_stride, z_stride}, box_y,
                       fetched);
}

// --- device -------------------------------------------------------------------

__device__ inline void tma_prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copies from global to shared memory; completes as bytes on `barrier`.
__device__ inline void tma_load(const TensorMap& map, uint32_t shared, uint32_t barrier, int x,
                                int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// The same of a tensor with five dims.
__device__ inline void tma_load(const TensorMap& map, uint32_t shared, uint32_t barrier, int x,
                                int y, const int (&z)[3]) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z[0]), "r"(z[1]), "r"(z[2])
      : "memory");
}

// The same to that place in each block of the cluster whose bit is set, and to its barrier there.
__device__ inline void tma_load_multicast(const TensorMap& map, uint32_t shared, uint32_t barrier,
                                          int x, int y, int z, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(blocks)
      : "memory");
}

// Copies from shared to global memory. Each thread that wrote to shared memory by ordinary stores
// must first make them visible by tma_store_fence.
__device__ inline void tma_store(const TensorMap& map, uint32_t shared, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
      "r"(shared), "r"(x), "r"(y), "r"(z)
      : "memory");
}

__device__ inline void tma_store_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ inline void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;"); }

// Waits until all but the last `kPending` groups of stores have read their shared memory.
template <int kPending>
__device__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

}  // namespace cuda_ops
