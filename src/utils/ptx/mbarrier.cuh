// Barriers in shared memory that count arrivals and bytes: how the stages of a
// Hopper pipeline are handed from the copy engine to the tensor cores and back.
//
//   producer                                  consumer
//   wait(empty[s], phase ^ 1)                 wait(full[s], phase)
//   arrive_and_expect(full[s], bytes)         ... read the stage ...
//   copies that complete on full[s]           arrive(empty[s])
//
// A barrier starts in phase 0 and enters the next one when all its arrivals and
// all expected bytes are there. wait(b, p) returns once phase p is over, so a
// wait for "phase 1" on a fresh barrier returns at once: in its first round the
// producer finds every stage empty.
// Needs sm_90. Addresses are 32-bit shared-memory addresses, see shared_address.
#pragma once

#include <cstdint>

namespace cuda_ops {

__device__ inline uint32_t shared_address(const void* pointer) {
  return uint32_t(__cvta_generic_to_shared(pointer));
}

// The same place in the shared memory of the cluster's block `rank`.
__device__ inline uint32_t in_block(uint32_t address, uint32_t rank) {
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}
template <class T>
__device__ T* in_block(T* pointer, uint32_t rank) {
  T* mapped;
  asm("mapa.u64 %0, %1, %2;" : "=l"(mapped) : "l"(pointer), "r"(rank));
  return mapped;
}

__device__ inline void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// Makes initialized barriers visible to the copy engine and to other blocks.
__device__ inline void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The same on a barrier of any block of the cluster, at an address from in_block. Not
// `.release.cluster`, which is a fence of the whole GPU: this does not show what the thread wrote.
__device__ inline void mbarrier_arrive_in_cluster(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ inline void mbarrier_arrive_and_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// try_wait suspends the thread for a while in hardware, so the loop hardly spins.
__device__ inline void mbarrier_wait(uint32_t barrier, uint32_t phase) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}\n" ::"r"(barrier),
      "r"(phase)
      : "memory");
}

// --- clusters -----------------------------------------------------------------

__device__ inline uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// For clusters of a one-dimensional grid; without clusters each block is one of its own.
__device__ inline uint32_t cluster_index() {
  uint32_t index;
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  return index;
}
__device__ inline uint32_t cluster_count() {
  uint32_t count;
  asm volatile("mov.u32 %0, %%nclusterid.x;" : "=r"(count));
  return count;
}

// Waits for all threads of all blocks of the cluster; what a thread wrote before, and what it knows
// of by barriers of its block, can be read after. In each warp this is a fence of the whole GPU:
__device__ inline void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;" ::
          : "memory");
}

// The same for a thread that has nothing to show, such as one that leaves. Its reads have arrived.
__device__ inline void cluster_meet() {
  asm volatile("fence.acq_rel.cta;" ::: "memory");
  asm volatile(
      "barrier.cluster.arrive.relaxed;\n"
      "barrier.cluster.wait.acquire;" ::
          : "memory");
}

// A barrier of `threads` threads of this block; 0 is __syncthreads' own.
__device__ inline void named_barrier(uint32_t name, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

}  // namespace cuda_ops
