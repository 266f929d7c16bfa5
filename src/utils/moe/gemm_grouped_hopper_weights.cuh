// The weights product of gemm_grouped.cuh on Hopper, for one operand whose rows are gathered and
// one at positions: there an expert's rows are neighbors, which the copy engine brings.
//
// The warpgroups are those of gemm_grouped_hopper.cuh, and all four producing warps gather. Both
// operands are line-major, and their k's are assignments: a stage has the rows of 64 assignments,
// 128 columns of the gathered operand and 256 of the other, in boxes of 64.
// The gathered one is wgmma's rows, whichever dim of out it is, since copies of threads cost
// more than the copy engine's: where it is the columns of out, sums leave turned over.
#pragma once

#include "moe/gemm_grouped_hopper.cuh"

namespace cuda_ops {

#ifdef CUDA_OPS_HOPPER_CODE

// A tile: its expert, its first line of a and of b, and its positions.
struct WeightsTile {
  int expert, m, n;
  int32_t begin, end;
};

// Returns tile number `index`, or one without assignments behind the last.
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

// Clears b's boxes from row `count` on: at positions, an expert's last stage has rows of the next
// expert behind its own. The gathered operand has zeros there already, but 0 * NaN is NaN.
// Consumers that multiply share the work, both or one `alone`, while the tensor cores are at the
// stage before.
__device__ inline void clear_tail(uint32_t b, int count, int consumer, bool alone) {
  using Tile = GroupedHopper;
  const int threads = alone ? 128 : 128 * Tile::kConsumers;
  const int thread = int(threadIdx.x) - (alone ? 128 * (1 + consumer) : 128);
  for (int at = count * kSwizzleBytes + 16 * thread; at < Tile::kBox; at += 16 * threads) {
#pragma unroll
    for (int box = 0; box < Tile::kBytesB; box += Tile::kBox) {
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(b + uint32_t(box + at)), "r"(0),
                   "r"(0), "r"(0), "r"(0)
                   : "memory");
    }
  }
  tma_store_fence();  // wgmma sees them
  named_barrier(uint32_t(1 + (alone ? consumer : Tile::kConsumers)), uint32_t(threads));
}

#endif

// p.a is gathered and p.b at positions. kTransposed: out is (n, m).
template <class T, bool kTransposed>
__global__ void __launch_bounds__(GroupedHopper::kThreads, 1)
    grouped_weights_hopper_kernel(const __grid_constant__ TensorMap map_b,
                                  const __grid_constant__ TensorMap map_out,
                                  const __grid_constant__ GroupedWeights p) {
#ifdef CUDA_OPS_HOPPER_CODE
  using Tile = GroupedHopper;
  extern __shared__ uint8_t shared[];
  constexpr int kArrivals = 1 + 4;  // the copy engine, and four warps that copy
  GroupedRing<Tile> ring(shared, kArrivals);
  __syncthreads();
  const int group = uniform(int(threadIdx.x) / 128), thread = int(threadIdx.x) % 128;
  int index = int(blockIdx.x);
  WeightsTile tile = weights_tile(p, index);

  if (group == 0) {
    // --- producer
    asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
    // A thread has one 16-byte column, in each box, of 4 rows, 16 apart.
    constexpr int kRows = 4, kStep = 16;
    const int row = thread / 8, chunk = thread % 8;
    const uint32_t to = uint32_t(row * kSwizzleBytes + ((chunk ^ (row % 8)) * 16));
    // `tile` is the rest from the next stage on. The numbers are read a stage ahead, beyond the
    // tile's end too; -1: none.
    int32_t numbers[kRows];
    const auto read_numbers = [&] {
      while (tile.begin == tile.end && tile.expert < p.experts) {
        tile = weights_tile(p, index += int(gridDim.x));
      }
      const int rows = tile.end - tile.begin - row;  // from `row` on
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        numbers[i] = kStep * i < rows ? p.order[tile.begin + row + kStep * i] : -1;
      }
    };
    read_numbers();
    GroupedCopies copies;
    for (; tile.expert < p.experts; ring.advance()) {
      const int m = tile.m + chunk * 8, n = tile.n, at = tile.begin;
      // Divided whether wanted or not: behind branches, divisions wait for each other.
      bool there[kRows];
      const T* from[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        there[i] = numbers[i] >= 0;
        const uint32_t number = uint32_t(there[i] ? numbers[i] : 0) / uint32_t(p.rows_a.divisor);
        from[i] = static_cast<const T*>(p.a) + number * p.m + m;
      }
      tile.begin = tile.end - at > Tile::kBlockK ? at + Tile::kBlockK : tile.end;
      read_numbers();
      const uint32_t a = ring.memory(), b = a + Tile::kBytesA;
      ring.wait_empty();
      if (thread == 0) {
        const uint32_t arrived = ring.full + 8 * ring.stage;
        mbarrier_arrive_and_expect(arrived, Tile::kBytesB);
#pragma unroll
        for (int i = 0; i < Tile::kTileN / 64; ++i) {
          tma_load(map_b, b + uint32_t(i * Tile::kBox), arrived, n + 64 * i, at, 0);
        }
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int box = 0; box < Tile::kTileM / 64; ++box) {
          cp_async(a + to + uint32_t(i * kStep * kSwizzleBytes + box * Tile::kBox),
                   from[i] + 64 * box, there[i] && m + 64 * box < p.m ? 16 : 0);
        }
      }
      copies.begun(ring);
    }
    copies.hand_over<0>();
  } else {
    // --- consumer
    asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
    const int consumer = group - 1;
    const uint32_t boxes = ring.staging() + uint32_t(2 * consumer * Tile::kBox);
    WeightsTile next;
    for (; tile.expert < p.experts; tile = next) {
      const int expert = tile.expert, m = tile.m + 64 * consumer, n = tile.n;
      const int count = tile.end - tile.begin;
      index += int(gridDim.x);
      if (count == 0) {
        next = weights_tile(p, index);
        T* out = static_cast<T*>(p.out) + expert * p.m * p.n;
        // The place in out where the consumer's rows begin.
        const int row = kTransposed ? n : m, column = kTransposed ? m : n;
        const int64_t height = kTransposed ? p.n : p.m, width = kTransposed ? p.m : p.n;
        constexpr int kHeight = kTransposed ? Tile::kTileN : 64;
        constexpr int kWidth = kTransposed ? 64 : Tile::kTileN;
        for (int first = row; first < row + kHeight; first += 64) {
          int32_t rows[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            rows[i] = first + grouped_row(i) < height ? first + grouped_row(i) : -1;
          }
          clear_rows(out + column, width, rows, width - column < kWidth ? width - column : kWidth);
        }
        continue;
      }
      const int whole = count / Tile::kBlockK, left = count % Tile::kBlockK;
      const int blocks = whole + (left > 0);
      float sums[Tile::kSums];
      const bool busy = m < p.m, alone = tile.m + 64 >= p.m;
      grouped_sums<T, true, true>(ring, blocks, consumer, busy, sums, [&](int kb) {
        if (kb == whole && busy) {
          clear_tail(ring.memory() + Tile::kBytesA, left, consumer, alone);
        }
        // Computed here, while the tensor cores are at the stage before: divisions, and offsets to
        // read.
        if (kb == blocks - 1) next = weights_tile(p, index);
      });
      if (!busy) continue;
#pragma unroll
      for (int i = 0; i < Tile::kTileN / 64; ++i) {
        OutPair<T> pairs[16];
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          pairs[j] = from_compute(sums[32 * i + 2 * j], sums[32 * i + 2 * j + 1], T{});
        }
        const uint32_t box = boxes + uint32_t(i % 2 * Tile::kBox);
        fill_box<T, kTransposed>(box, pairs, consumer);
        if (thread != 0) continue;
        if constexpr (kTransposed) {
          tma_store(map_out, box, m, n + 64 * i, expert);
        } else {
          tma_store(map_out, box, n + 64 * i, m, expert);
        }
        tma_store_commit();
      }
    }
    // The copy engine still reads this block's memory.
    if (thread == 0) tma_store_wait_read<0>();
  }
#endif
}

template <class T, bool kTransposed>
cudaError_t grouped_weights_hopper_launch(const GroupedWeights& p, cudaStream_t stream) {
  using Tile = GroupedHopper;
  const int64_t tiles = p.experts * ((p.m + Tile::kTileM - 1) / Tile::kTileM) *
                        ((p.n + Tile::kTileN - 1) / Tile::kTileN);
  if (tiles == 0) return cudaSuccess;
  TensorMap map_b, map_out;
  cudaError_t error = grouped_map<T>(map_b, p.b, p.n, p.assignments, 1, Tile::kBlockK);
  if (error != cudaSuccess) return error;
  error = grouped_map<T>(map_out, p.out, kTransposed ? p.m : p.n, kTransposed ? p.n : p.m,
                         p.experts, 64);
  if (error != cudaSuccess) return error;
  return grouped_hopper_launch<Tile>(grouped_weights_hopper_kernel<T, kTransposed>, Tile::shared(2),
                                     tiles, stream, map_b, map_out, p);
}

// grouped_weights for one operand that is gathered and one at positions, with rows of whole aligned
// 16-byte vectors and at least one assignment.
template <class T>
cudaError_t grouped_weights_hopper(const GroupedWeights& p, cudaStream_t stream) {
  if (p.rows_a.gathered() == p.rows_b.gathered()) return cudaErrorInvalidValue;
  if (!p.rows_b.gathered()) return grouped_weights_hopper_launch<T, false>(p, stream);
  GroupedWeights turned = p;
  turned.m = p.n;
  turned.n = p.m;
  turned.rows_a = p.rows_b;
  turned.rows_b = p.rows_a;
  turned.a = p.b;
  turned.b = p.a;
  return grouped_weights_hopper_launch<T, true>(turned, stream);
}

}  // namespace cuda_ops
