// The shared memory of a block of gemm_grouped_hopper.cuh, and how its warps hand it over: a ring
// of stages, the numbers of the tiles that the block takes, and copies that are on their way.
#pragma once

#include "ptx/cp_async.cuh"
#include "gemm/gemm_hopper.cuh"

namespace cuda_ops {

template <int kConsuming>
struct GroupedTile {
  static constexpr int kConsumers = kConsuming, kThreads = 128 * (1 + kConsumers);
  static constexpr int kTileM = 64 * kConsumers, kTileN = kConsumers == 2 ? 256 : 128;
  static constexpr int kBlockK = 64, kSums = kTileN / 2;
  // 64 lines, or 64 k's, of 128 bytes.
  static constexpr int kBox = 64 * kSwizzleBytes;
  static constexpr int kBytesA = kTileM * kSwizzleBytes, kBytesB = kTileN * kSwizzleBytes;
  static constexpr int kStage = kBytesA + kBytesB, kStages = 4;
  // Bytes for barriers, so that the boxes behind them are aligned.
  static constexpr int kBarriers = 1024;
  // Bytes of a block with `boxes` for the results of each consumer, and 1 KB to align the start.
  static constexpr int shared(int boxes) {
    return kStages * kStage + kBarriers + boxes * kConsumers * kBox + 1024;
  }
};
using GroupedHopper = GroupedTile<2>;
using TallGroupedHopper = GroupedTile<3>;

#ifdef CUDA_OPS_HOPPER_CODE

// One warp's way around the stages, and the barriers that hand them over.
template <class TileOfRing>
struct GroupedRing {
  using Tile = TileOfRing;
  uint32_t stages, full, empty;
  int stage = 0;
  uint32_t phase = 0;

  // `arrivals`: the number that makes a stage full.
  __device__ GroupedRing(const uint8_t* shared, uint32_t arrivals)
      : stages((shared_address(shared) + 1023) & ~1023u),
        full(stages + Tile::kStages * Tile::kStage),
        empty(full + 8 * Tile::kStages) {
    if (threadIdx.x != 0) return;
    for (int s = 0; s < Tile::kStages; ++s) {
      mbarrier_init(full + 8 * s, arrivals);
      mbarrier_init(empty + 8 * s, 4 * Tile::kConsumers);  // each consuming warp
    }
    mbarrier_init_fence();
  }

  // Boxes for results.
  __device__ uint32_t staging() const { return full + Tile::kBarriers; }
  __device__ uint32_t memory() const { return stages + uint32_t(stage) * Tile::kStage; }
  __device__ void advance() {
    if (++stage == Tile::kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
  __device__ void wait_empty() const { mbarrier_wait(empty + 8 * stage, phase ^ 1); }
  __device__ void wait_full() const { mbarrier_wait(full + 8 * stage, phase); }
  __device__ void release(int s) const {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty + 8 * s);
  }
};

// The numbers of the tiles that a block takes, from the thread that takes them to all warps.
//
// Each block begins with its own number; the next one is the first that no block has taken. So
// tiles are in flight in order, however long each takes, and neighbors read the same data at about
// the same time: blocks that took every 132nd tile drifted apart, since an expert's last tile may
// be shorter, and read its matrix from memory again.
struct TileQueue {
  static constexpr int kSlots = 2;
  int32_t* numbers;      // kSlots of them, in shared memory
  uint32_t full, empty;  // barriers of each slot
  int slot = 0;
  uint32_t phase = 0;

  // `readers`: warps that call next().
  __device__ TileQueue(int32_t* slots, uint32_t barriers, uint32_t readers)
      : numbers(slots), full(barriers), empty(barriers + 8 * kSlots) {
    if (threadIdx.x != 0) return;
    for (int s = 0; s < kSlots; ++s) {
      mbarrier_init(full + 8 * s, 1);
      mbarrier_init(empty + 8 * s, readers);
    }
    mbarrier_init_fence();
  }

  __device__ void advance() {
    if (++slot == kSlots) {
      slot = 0;
      phase ^= 1;
    }
  }
  // Called by one thread, which keeps its place by advance() alone.
  __device__ void put(int number) const {
    mbarrier_wait(empty + 8 * slot, phase ^ 1);
    numbers[slot] = number;
    mbarrier_arrive(full + 8 * slot);
  }
  // Called by a whole warp.
  __device__ int next() {
    mbarrier_wait(full + 8 * slot, phase);
    const int number = uniform(numbers[slot]);
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty + 8 * slot);
    advance();
    return number;
  }
};

// The stage of a producing warp whose copies are on their way. It is handed over one stage later,
// when its copies are there and those of the next have begun.
struct GroupedCopies {
  uint32_t barrier = 0;  // of that stage; 0: none

  // Hands over when all copies but those of the last `kPending` stages are there. A fence of each
  // writing thread makes the bytes that cp.async wrote visible to wgmma.
  template <int kPending>
  __device__ void hand_over() {
    if (barrier == 0) return;
    cp_async_wait<kPending>();
    tma_store_fence();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
    barrier = 0;
  }
  template <class Ring>
  __device__ void begun(const Ring& ring) {
    cp_async_commit();
    hand_over<1>();
    barrier = ring.full + 8 * ring.stage;
  }
};

#endif

}  // namespace cuda_ops
