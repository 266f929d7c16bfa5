// The launch configuration of greatest occupancy, as a value: how many threads a block may best
// have by the kernel's registers and shared memory, and how many such blocks a multiprocessor
// holds. A loop over a grid of `resident()` blocks fills the GPU exactly once.
//
//   const Occupancy best = occupancy_of(my_kernel<T>);
//   if (best.error != cudaSuccess) return best.error;
//   my_kernel<T><<<best.grid(n), best.block, 0, stream>>>(...);
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "division.h"
#include "ptx/capability.h"

namespace cuda_ops {

struct Occupancy {
  int block = 0;          // threads
  int blocks_per_sm = 0;  // that fit at a time
  int sms = 1;
  cudaError_t error = cudaSuccess;  // what the driver said; the numbers are then 0

  int resident() const { return blocks_per_sm * sms; }  // on the whole GPU

  // Blocks that give each of `n` elements a thread.
  int64_t grid(int64_t n) const { return block > 0 ? ceil_div(n, int64_t(block)) : 0; }

  // As many, and no more than fit at a time, for kernels that loop over the grid.
  int64_t resident_grid(int64_t n) const {
    const int64_t all = grid(n);
    return all < resident() ? all : resident();
  }
};

namespace detail {

// What the driver said, for a kernel, a device and the bytes of dynamic shared memory. A slot is
// written once and never changes, so reading needs no lock: `state` is stored last.
struct KnownOccupancy {
  enum : int { kFree, kWriting, kReady };
  std::atomic<int> state{kFree};
  const void* kernel = nullptr;
  int64_t shared_bytes = 0;
  int device = 0, asked_block = 0, block = 0, blocks_per_sm = 0;

  bool is_for(const void* k, int d, int64_t bytes, int asked) const {
    return kernel == k && device == d && shared_bytes == bytes && asked_block == asked;
  }
};

constexpr int kMostKnownOccupancies = 64;  // of a library; what finds no slot is asked each time

inline Occupancy ask_occupancy(const void* kernel, int block, int64_t shared_bytes) {
  Occupancy answer;
  int grid = 0;
  const size_t bytes = size_t(shared_bytes);
  if (block == 0) {
    answer.error = cudaOccupancyMaxPotentialBlockSize(&grid, &answer.block, kernel, bytes, 0);
  } else {
    answer.block = block;
  }
  if (answer.error == cudaSuccess) {
    answer.error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&answer.blocks_per_sm, kernel,
                                                                 answer.block, bytes);
  }
  if (answer.error != cudaSuccess) {
    (void)cudaGetLastError();  // else the next launch would report it
    answer.block = answer.blocks_per_sm = 0;
  }
  return answer;
}

inline Occupancy occupancy_at(const void* kernel, int block, int64_t shared_bytes) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return {0, 0, 1, error};
  const int sms = current_device().sms;
  static KnownOccupancy known[kMostKnownOccupancies];
  const uint64_t mixed = (uint64_t(reinterpret_cast<uintptr_t>(kernel)) >> 4) * 31 +
                         uint64_t(device) * 7 + uint64_t(shared_bytes) + uint64_t(block);
  const int home = int(mixed % kMostKnownOccupancies);
  for (int i = 0; i < kMostKnownOccupancies; ++i) {
    KnownOccupancy& slot = known[(home + i) % kMostKnownOccupancies];
    const int state = slot.state.load(std::memory_order_acquire);
    if (state == KnownOccupancy::kReady) {
      if (!slot.is_for(kernel, device, shared_bytes, block)) continue;
      return {slot.block, slot.blocks_per_sm, sms, cudaSuccess};
    }
    Occupancy answer = ask_occupancy(kernel, block, shared_bytes);
    answer.sms = sms;
    int expected = KnownOccupancy::kFree;
    if (answer.error == cudaSuccess &&
        slot.state.compare_exchange_strong(expected, KnownOccupancy::kWriting)) {
      slot.kernel = kernel;
      slot.device = device;
      slot.shared_bytes = shared_bytes;
      slot.asked_block = block;
      slot.block = answer.block;
      slot.blocks_per_sm = answer.blocks_per_sm;
      slot.state.store(KnownOccupancy::kReady, std::memory_order_release);
    }
    return answer;
  }
  Occupancy answer = ask_occupancy(kernel, block, shared_bytes);
  answer.sms = sms;
  return answer;
}

}  // namespace detail

// The block of greatest occupancy on the current device for `shared_bytes` of dynamic shared memory
// a block. Asks the driver once for each kernel, device and number of bytes.
template <class... Args>
Occupancy occupancy_of(void (*kernel)(Args...), int64_t shared_bytes = 0) {
  return detail::occupancy_at(reinterpret_cast<const void*>(kernel), 0, shared_bytes);
}

// How many blocks of `block` threads fit on a multiprocessor. More than 48 KB of dynamic shared
// memory first need cudaFuncSetAttribute, as the launch does.
template <class... Args>
Occupancy occupancy_of_block(void (*kernel)(Args...), int block, int64_t shared_bytes = 0) {
  if (block <= 0) return {0, 0, 1, cudaErrorInvalidValue};
  return detail::occupancy_at(reinterpret_cast<const void*>(kernel), block, shared_bytes);
}

}  // namespace cuda_ops
