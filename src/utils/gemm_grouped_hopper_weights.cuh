// The weights of gemm_grouped.cuh on Hopper, of operands at their positions: an expert's rows
// are neighbours, so that the copy engine brings both, and one thread asks for it.
//
// The warpgroups are those of gemm_grouped_hopper.cuh. Both operands are line-major, and their
// k's are assignments: a stage has the rows of 64 of them, of which a tile has 128 columns of a
// and 256 of b, in boxes of 64.
#pragma once

#include "gemm_grouped_hopper.cuh"

namespace cuda_ops {

#ifdef CUDA_OPS_HOPPER_CODE

// Of a tile: whose it is, its first line of a and of b, and positions.
struct WeightsTile {
  int expert, m, n;
  int32_t begin, end;
};

// Tile number `index`, or one without assignments behind the last.
__device__ inline WeightsTile weights_tile(const GroupedWeights& p, int index) {
  using Tile = GroupedHopper;
  const auto tiles_m = unsigned((p.m + Tile::kTileM - 1) / Tile::kTileM);
  const auto tiles_n = unsigned((p.n + Tile::kTileN - 1) / Tile::kTileN);
  const unsigned matrix = tiles_m * tiles_n, expert = unsigned(index) / matrix;
  if (int(expert) >= p.experts) return {p.experts, 0, 0, 0, 0};
  const auto at = tile_in_bands(unsigned(index) - expert * matrix, tiles_m, tiles_n, 16u);
  return {int(expert), int(at.row) * Tile::kTileM, int(at.column) * Tile::kTileN, p.offsets[expert],
          p.offsets[expert + 1]};
}

// An expert's last stage has rows of the next one behind its own: zeros in place of them, from
// row `count` on, and in both operands, since 0 * NaN is NaN. All consumers share the work, while
// the tensor cores are at the stage before.
__device__ inline void clear_tail(uint32_t stage, int count) {
  using Tile = GroupedHopper;
  constexpr int kThreads = 128 * Tile::kConsumers;
  for (int at = count * kSwizzleBytes + 16 * (int(threadIdx.x) - 128); at < Tile::kBox;
       at += 16 * kThreads) {
#pragma unroll
    for (int box = 0; box < Tile::kStage; box += Tile::kBox) {
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(stage + uint32_t(box + at)),
                   "r"(0), "r"(0), "r"(0), "r"(0)
                   : "memory");
    }
  }
  tma_store_fence();  // wgmma sees them
  named_barrier(1 + Tile::kConsumers, kThreads);
}

#endif

template <class T>
__global__ void __launch_bounds__(GroupedHopper::kThreads, 1)
    grouped_weights_hopper_kernel(const __grid_constant__ TensorMap map_a,
                                  const __grid_constant__ TensorMap map_b,
                                  const __grid_constant__ TensorMap map_out,
                                  const __grid_constant__ GroupedWeights p) {
#ifdef CUDA_OPS_HOPPER_CODE
  using Tile = GroupedHopper;
  extern __shared__ uint8_t shared[];
  GroupedRing ring(shared, 1);
  __syncthreads();
  const int group = int(threadIdx.x) / 128, thread = int(threadIdx.x) % 128;
  int index = int(blockIdx.x);
  WeightsTile tile = weights_tile(p, index);

  if (group == 0) {
    // --- producer
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (thread == 0) {
      for (; tile.expert < p.experts; tile = weights_tile(p, index += int(gridDim.x))) {
#pragma unroll 1  // 40 registers
        for (int32_t at = tile.begin; at < tile.end; at += Tile::kBlockK, ring.advance()) {
          const uint32_t a = ring.memory(), b = a + Tile::kBytesA;
          const uint32_t arrived = ring.full + 8 * ring.stage;
          ring.wait_empty();
          mbarrier_arrive_and_expect(arrived, Tile::kStage);
#pragma unroll
          for (int i = 0; i < Tile::kTileM / 64; ++i) {
            tma_load(map_a, a + uint32_t(i * Tile::kBox), arrived, tile.m + 64 * i, at, 0);
          }
#pragma unroll
          for (int i = 0; i < Tile::kTileN / 64; ++i) {
            tma_load(map_b, b + uint32_t(i * Tile::kBox), arrived, tile.n + 64 * i, at, 0);
          }
        }
      }
    }
  } else {
    // --- consumer
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int consumer = group - 1;
    const uint32_t boxes = ring.staging() + uint32_t(2 * consumer * Tile::kBox);
    WeightsTile next;
    for (; tile.expert < p.experts; tile = next) {
      const int expert = tile.expert, m = tile.m + 64 * consumer, n = tile.n;
      const int count = tile.end - tile.begin;
      index += int(gridDim.x);
      if (count == 0) {
        next = weights_tile(p, index);
        int32_t rows[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) rows[i] = m + grouped_row(i) < p.m ? m + grouped_row(i) : -1;
        T* out = static_cast<T*>(p.out) + expert * p.m * p.n + n;
        clear_rows(out, p.n, rows, p.n - n < Tile::kTileN ? p.n - n : Tile::kTileN);
        continue;
      }
      const int whole = count / Tile::kBlockK, left = count % Tile::kBlockK;
      const int blocks = whole + (left > 0);
      float sums[Tile::kSums];
      grouped_sums<T, true, true>(ring, blocks, consumer, m < p.m, sums, [&](int kb) {
        if (kb == whole) clear_tail(ring.memory(), left);
        // Here, while the tensor cores are at the stage before: divisions, and offsets to read.
        if (kb == blocks - 1) next = weights_tile(p, index);
      });
      if (m >= p.m) continue;
#pragma unroll
      for (int i = 0; i < Tile::kTileN / 64; ++i) {
        OutPair<T> pairs[16];
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          pairs[j] = from_compute(sums[32 * i + 2 * j], sums[32 * i + 2 * j + 1], T{});
        }
        const uint32_t box = boxes + uint32_t(i % 2 * Tile::kBox);
        fill_box<T>(box, pairs, consumer);
        if (thread != 0) continue;
        tma_store(map_out, box, n + 64 * i, m, expert);
        tma_store_commit();
      }
    }
    // The copy engine still reads this block's memory.
    if (thread == 0) tma_store_wait_read<0>();
  }
#endif
}

// grouped_weights of operands at their positions, with rows of whole aligned 16-byte vectors.
// There are assignments.
template <class T>
cudaError_t grouped_weights_hopper(const GroupedWeights& p, cudaStream_t stream) {
  using Tile = GroupedHopper;
  const int64_t tiles = p.experts * ((p.m + Tile::kTileM - 1) / Tile::kTileM) *
                        ((p.n + Tile::kTileN - 1) / Tile::kTileN);
  if (tiles == 0) return cudaSuccess;
  if (p.share_a != 0 || p.share_b != 0) return cudaErrorInvalidValue;
  TensorMap map_a, map_b, map_out;
  cudaError_t error = grouped_map<T>(map_a, p.a, p.m, p.assignments, 1, Tile::kBlockK);
  if (error != cudaSuccess) return error;
  error = grouped_map<T>(map_b, p.b, p.n, p.assignments, 1, Tile::kBlockK);
  if (error != cudaSuccess) return error;
  error = grouped_map<T>(map_out, p.out, p.n, p.m, p.experts, 64);
  if (error != cudaSuccess) return error;
  return grouped_hopper_launch(grouped_weights_hopper_kernel<T>, Tile::shared(2), tiles, stream,
                               map_a, map_b, map_out, p);
}

}  // namespace cuda_ops
