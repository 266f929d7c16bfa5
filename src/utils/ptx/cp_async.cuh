// Copies from global to shared memory that a thread starts and does not wait
// for (sm_80 and later). They are counted in groups of the thread that started them.
#pragma once

#include <cstdint>

namespace cuda_ops {

// Copies `bytes` of the 16 and sets the rest to 0.
__device__ inline void cp_async(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(bytes)
               : "memory");
}

// Copies 4, 8 or 16 bytes, all of them; those of 16 go past the L1 cache.
template <int kBytes>
__device__ void cp_async_whole(uint32_t shared, const void* global) {
  if constexpr (kBytes == 16) {
    cp_async(shared, global, 16);
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(global), "n"(kBytes)
                 : "memory");
  }
}

__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the last `kPending` groups are there.
template <int kPending>
__device__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace cuda_ops
