// The stages of the Hopper kernel, and how its consumers multiply them.
//
//   stage = tile of a (128 lines x 128 bytes of K) + tile of b (kTileN lines x 128 bytes)
//
// 3xTF32 has two tiles of each operand in a stage, `high` (the values rounded to tf32)
// and then `low` (the rest of each), and adds three of their four products.
#pragma once

#include <type_traits>

#include "gemm/gemm_hopper.h"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"

namespace cuda_ops {

// --- types --------------------------------------------------------------------

// Floats that were split into two tf32: what gemm_pack.cuh makes of an operand.
struct TF32x3 {
  float value;
};

// How a type is stored, given to wgmma, and written to the output.
template <class T> struct HopperType;
template <> struct HopperType<Half> {
  using Out = Half;
  using Factor = Half;
  static constexpr int kParts = 1;
  static constexpr CUtensorMapDataType kMap = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  static constexpr CUtensorMapDataType kOutMap = kMap;
};
template <> struct HopperType<BFloat16> {
  using Out = BFloat16;
  using Factor = BFloat16;
  static constexpr int kParts = 1;
  static constexpr CUtensorMapDataType kMap = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  static constexpr CUtensorMapDataType kOutMap = kMap;
};
template <> struct HopperType<TF32> {
  using Out = float;
  using Factor = TF32;
  static constexpr int kParts = 1;
  // The copy engine rounds to the nearest tf32; wgmma alone would cut bits off.
  static constexpr CUtensorMapDataType kMap = CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
  static constexpr CUtensorMapDataType kOutMap = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
};
template <> struct HopperType<TF32x3> : HopperType<TF32> {
  static constexpr int kParts = 2;
};

// tf32 knows K-major operands alone.
template <class T>
constexpr bool kHopperKMajor = std::is_same_v<typename HopperType<T>::Factor, TF32>;

// --- sizes --------------------------------------------------------------------

template <class T, int kTileN, bool kLineMajorB>
struct HopperTile {
  static constexpr int kTileM = kHopperTileM;
  static constexpr int kBlockK = kSwizzleBytes / int(sizeof(T));
  static constexpr int kParts = HopperType<T>::kParts;
  static constexpr bool kNarrow = kTileN < 128;
  // A stage is given back as soon as it is multiplied, not with the next one: the next load waits
  // for its room. 128 x 16 has six stages, and is a percent slower that way.
  static constexpr bool kGivesBackAtOnce = kNarrow && kTileN >= 32;
  // Line-major tiles come in blocks of 64 lines.
  static constexpr int kLinesB = kLineMajorB ? (kTileN + 63) / 64 * 64 : kTileN;
  static constexpr int kBytesA = kTileM * kSwizzleBytes;  // of one part
  static constexpr int kBytesB = kLinesB * kSwizzleBytes;
  static constexpr int kConsumers = 2;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  // Two 64-row boxes of 128 bytes per consumer: one is written while the other leaves.
  static constexpr int kBox = 64 * kSwizzleBytes;
  static constexpr int kStaging = kNarrow ? 0 : 2 * kBox * kConsumers;
  static constexpr int kStage = kParts * (kBytesA + kBytesB);
  // The inputs of an epilogue for each pair of columns; each consumer has a copy.
  static constexpr int kColumnBytes = 4;
  // A block may have 227 KB; two blocks on an SM have 113 KB each. The rest is for barriers, for
  // the start's alignment and, in wide tiles, for columns.
  static constexpr int kRest = kNarrow ? 2048 : 2048 + kConsumers * kTileN / 2 * kColumnBytes;
  static constexpr int kBudget = (kNarrow ? 113 : 227) * 1024 - kRest - kStaging;
  static constexpr int kStages = kBudget / kStage;
  static constexpr int kShared = kStages * kStage + kStaging + kRest;
  // Partial sums for a split: lines of floats. A warp stores 8 rows by 4 pairs of columns,
  // one float along the rows or two along the columns: none meet in a bank.
  static constexpr int kPitchRows = kTileM + 4, kPitchCols = kTileN + 8;
  static_assert(kTileM * kPitchCols * 4 <= kStages * kStage, "partial sums overflow");
};

// --- the ring -----------------------------------------------------------------

// The stages in shared memory, and which of them a warp is at.
template <class Tile>
struct HopperRing {
  uint32_t memory, full, empty;  // the first stage; barriers of stages
  bool pair;                     // a stage is empty when both blocks of the pair have read it
  int stage = 0;
  uint32_t phase = 0;

  __device__ uint32_t a() const { return memory + uint32_t(stage * Tile::kStage); }
  __device__ uint32_t b() const { return a() + uint32_t(Tile::kParts * Tile::kBytesA); }
  // a(), for descriptors: all that follows from it is in uniform registers.
  __device__ uint32_t uniform_stage() const { return uint32_t(uniform(int(a()))); }
  __device__ void wait_full() const { mbarrier_wait(full + 8 * stage, phase); }
  __device__ void wait_empty() const { mbarrier_wait(empty + 8 * stage, phase ^ 1); }
  // Called by each consuming warp, once it has read the stage.
  __device__ void release(int read) const {
    const uint32_t lane = threadIdx.x % 32, barrier = empty + 8 * uint32_t(read);
    if (!pair) {
      if (lane == 0) mbarrier_arrive(barrier);
    } else if (lane < 2) {
      mbarrier_arrive_in_cluster(in_block(barrier, lane));
    }
  }
  __device__ void advance() {
    if (++stage == Tile::kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// --- products -----------------------------------------------------------------

// Adds up the sums of warpgroup `consumer`, from row 64 * consumer of the tile on, over the next
// `blocks` stages.
template <class T, int kTileN, bool kLineMajorA, bool kLineMajorB, class Tile>
__device__ __forceinline__ void hopper_sums(HopperRing<Tile>& ring, int blocks, int consumer,
                                            float (&sums)[kTileN / 2]) {
  using Product = Wgmma<typename HopperType<T>::Factor, kTileN, kLineMajorA, kLineMajorB>;
  constexpr uint64_t kStepA = kWgmmaStep<kLineMajorA>, kStepB = kWgmmaStep<kLineMajorB>;
  const auto rows_of = [&](uint32_t a) {
    return wgmma_descriptor(a + uint32_t(consumer) * Tile::kBox, 8192);
  };
  int previous = -1;
  if constexpr (Tile::kParts == 1) {
    for (int block = 0; block < blocks; ++block, ring.advance()) {
      ring.wait_full();
      const uint32_t stage = ring.uniform_stage();
      const uint64_t a = rows_of(stage);
      const uint64_t b = wgmma_descriptor(stage + Tile::kParts * Tile::kBytesA, 8192);
      wgmma_fence_sums(sums);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Product::run(sums, a + i * kStepA, b + i * kStepB, block > 0 || i > 0);
      }
      wgmma_commit();
      wgmma_fence_sums(sums);
      if constexpr (Tile::kGivesBackAtOnce) {
        wgmma_wait<0>();
        ring.release(ring.stage);
      } else {
        // The stage before this one has been read when its products are done.
        wgmma_wait<1>();
        if (previous >= 0) ring.release(previous);
        previous = ring.stage;
      }
    }
    wgmma_wait<0>();
    wgmma_fence_sums(sums);
    if (previous >= 0) ring.release(previous);
  } else {
    // Tensor cores cut off bits where they add, so that sums of many products come out too small.
    // The sums of high parts therefore cover one stage each and are added by instructions that
    // round, while the other products still run. The bits cut off those, 2^-11 of the sums, do
    // not matter.
    float highs[kTileN / 2], crosses[kTileN / 2];
#pragma unroll
    for (int i = 0; i < kTileN / 2; ++i) sums[i] = crosses[i] = 0;
    for (int block = 0; block < blocks; ++block, ring.advance()) {
      ring.wait_full();
      const uint32_t stage = ring.uniform_stage();
      const uint64_t high_a = rows_of(stage), low_a = rows_of(stage + Tile::kBytesA);
      const uint64_t high_b = wgmma_descriptor(stage + 2 * Tile::kBytesA, 8192);
      const uint64_t low_b =
          wgmma_descriptor(stage + 2 * Tile::kBytesA + uint32_t(Tile::kBytesB), 8192);
      wgmma_fence_sums(highs);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Product::run(highs, high_a + i * kStepA, high_b + i * kStepB, i > 0);
      }
      wgmma_commit();
      wgmma_fence_sums(highs);
      wgmma_wait<1>();  // the crosses of the stage before this one
      if (previous >= 0) ring.release(previous);
      previous = ring.stage;
      wgmma_fence_sums(crosses);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Product::run(crosses, low_a + i * kStepA, high_b + i * kStepB, true);
        Product::run(crosses, high_a + i * kStepA, low_b + i * kStepB, true);
      }
      wgmma_commit();
      wgmma_fence_sums(crosses);
      wgmma_wait<1>();  // the highs of this one
      wgmma_fence_sums(highs);
#pragma unroll
      for (int i = 0; i < kTileN / 2; ++i) sums[i] += highs[i];
    }
    wgmma_wait<0>();
    wgmma_fence_sums(crosses);
    if (previous >= 0) ring.release(previous);
    // An infinity times a low part of 0 is NaN: then the high parts alone are right.
#pragma unroll
    for (int i = 0; i < kTileN / 2; ++i) sums[i] += fabsf(crosses[i]) < INFINITY ? crosses[i] : 0;
  }
}

}  // namespace cuda_ops
