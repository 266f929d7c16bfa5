// The rows of gemm_grouped.cuh on Hopper: the loop of gemm_hopper.cuh. Rows at their positions
// come by the copy engine like everything else. It cannot gather, since it moves boxes of rows
// that follow each other: rows that lie anywhere are copied by the threads of warpgroup 0.
//
//   warpgroup 0   producer: one thread has the copy engine bring boxes; to gather, all four
//                 warps copy rows by cp.async, 16 bytes a thread, to where it would put them
//   warpgroup 1   consumer: rows  0 to  63 of the tile, sums in registers
//   warpgroup 2   consumer: rows 64 to 127
//
//   stage = 128 lines of a x 128 bytes of K + 256 lines of b x 128 bytes
//
// The tall tile has a third consumer, 192 rows and 128 lines of b, whose sums fit three
// warpgroups: an expert that has a few more rows than 128 reads its matrix once, not twice.
//
// A gated product's 256 lines are 128 gates and their 128 ups, so that sums[i] and
// sums[64 + i] of a thread belong together. Blocks stay and take tile after tile: the
// producer loads the next tile's stages while the consumers write this one's result.
#pragma once

#include "ptx/capability.h"
#include "moe/gemm_grouped.cuh"
#include "moe/gemm_grouped_ring.cuh"

namespace cuda_ops {

// Describes rows that lie one after the other, in matrices, to the copy engine.
template <class T>
cudaError_t grouped_map(TensorMap& map, const void* data, int64_t columns, int64_t rows,
                        int64_t matrices, int box_rows) {
  const int64_t row = columns * int64_t(sizeof(T));
  return tensor_map(map, HopperType<T>::kMap, int(sizeof(T)), data, columns, rows, matrices, row,
                    rows * row, box_rows);
}

#ifdef CUDA_OPS_HOPPER_CODE

// --- consumer -------------------------------------------------------------------

// Adds up a tile from `blocks` stages, at least one. `busy`: whether any of the warpgroup's 64 rows
// are wanted; it takes part in the hand-over in any case. Each consumer calls `arrived(kb)` when a
// stage is there.
template <class T, bool kLineMajorA, bool kLineMajorB, class Ring, class Arrived>
__device__ __forceinline__ void grouped_sums(Ring& ring, int blocks, int consumer, bool busy,
                                             float (&sums)[Ring::Tile::kSums],
                                             const Arrived& arrived) {
  using Tile = typename Ring::Tile;
  if (!busy) {
    for (int kb = 0; kb < blocks; ++kb, ring.advance()) {
      ring.wait_full();
      arrived(kb);
      __syncwarp();  // no lane may still wait for a phase that the release ends
      ring.release(ring.stage);
    }
    return;
  }
  int previous = -1;
  for (int kb = 0; kb < blocks; ++kb, ring.advance()) {
    ring.wait_full();
    arrived(kb);
    const uint32_t a = uint32_t(uniform(int(ring.memory()))), b = a + Tile::kBytesA;
    const uint64_t at_a = wgmma_descriptor(a + uint32_t(consumer * Tile::kBox), 8192);
    const uint64_t at_b = wgmma_descriptor(b, 8192);
    wgmma_fence_sums(sums);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Wgmma<T, Tile::kTileN, kLineMajorA, kLineMajorB>::run(
          sums, at_a + i * kWgmmaStep<kLineMajorA>, at_b + i * kWgmmaStep<kLineMajorB>,
          kb > 0 || i > 0);
    }
    wgmma_commit();
    wgmma_fence_sums(sums);
    // The stage before this one has been read once its products are done.
    wgmma_wait<1>();
    if (previous >= 0) ring.release(previous);
    previous = ring.stage;
  }
  wgmma_wait<0>();
  wgmma_fence_sums(sums);
  ring.release(previous);
}

// The rows among the warpgroup's 64 that a lane writes: four of its warp's 16.
__device__ inline int grouped_row(int i) {
  return int(threadIdx.x) / 32 % 4 * 16 + int(threadIdx.x) % 32 / 8 + 4 * i;
}

// Stores zeros in the columns that store_rows would write.
template <class T>
__device__ void clear_rows(T* out, int64_t stride, const int32_t (&rows)[4], int64_t columns) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (rows[i] < 0) continue;
    for (int64_t c = threadIdx.x % 8 * 8; c < columns; c += 64) {
      *reinterpret_cast<uint4*>(out + rows[i] * stride + c) = uint4{};
    }
  }
}

// Stores 64 columns of the warpgroup's rows through shared memory, so that the 128 bytes of a row
// leave together. Row grouped_row(i) goes to rows[i] of out, or nowhere if that is below 0;
// `columns` are left in it. Each warp has a part of the box for itself.
template <class T>
__device__ void store_rows(uint32_t box, const float (&values)[32], T* out, int64_t stride,
                           const int32_t (&rows)[4], int64_t columns) {
  OutPair<T> pairs[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) pairs[i] = from_compute(values[2 * i], values[2 * i + 1], T{});
  write_box<T>(box, pairs);
  __syncwarp();
  const int chunk = int(threadIdx.x) % 8;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = grouped_row(i);
    if (rows[i] < 0 || chunk * 8 >= columns) continue;
    uint4 word;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
                 : "r"(box + uint32_t(row * kSwizzleBytes + ((chunk ^ (row % 8)) * 16)))
                 : "memory");
    // Spelled out: the compiler makes four stores of some of them.
    asm volatile(
        "st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(out + rows[i] * stride + chunk * 8),
        "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w)
        : "memory");
  }
  __syncwarp();  // before the box is written again
}

#endif

// --- rows -----------------------------------------------------------------------

// kGather: rows of a are gathered, and map_a is not looked at.
template <class T, class Tile, bool kGated, bool kLineMajorB, bool kGather>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    grouped_rows_hopper_kernel(const __grid_constant__ TensorMap map_a,
                               const __grid_constant__ TensorMap map_b,
                               const __grid_constant__ GroupedRows p) {
#ifdef CUDA_OPS_HOPPER_CODE
  constexpr bool kTall = Tile::kConsumers == 3;
  constexpr int kColumns = kGated ? Tile::kTileN / 2 : Tile::kTileN;
  extern __shared__ uint8_t shared[];
  // In shared memory, so that a tile begins without waiting for memory.
  __shared__ int32_t starts[kMostBins + 1], offsets[kMostBins], tile_numbers[TileQueue::kSlots];
  // One arrival of the copy engine, and those of four warps that copy.
  constexpr int kArrivals = kGather ? 1 + 4 : 1;
  GroupedRing<Tile> ring(shared, kArrivals);
  TileQueue queue(tile_numbers, ring.full + 16 * Tile::kStages,
                  4 * Tile::kConsumers + (kGather ? 4 : 0));
  for (int i = int(threadIdx.x); i <= p.experts; i += Tile::kThreads) offsets[i] = p.offsets[i];
  __syncthreads();
  add_up_tiles(offsets, p.experts, p.assignments, Tile::kTileM, starts);
  const int group = uniform(int(threadIdx.x) / 128), thread = int(threadIdx.x) % 128;
  const int columns = int((p.n + kColumns - 1) / kColumns);
  // Results of 2^31 tiles are larger than any memory.
  const int tiles = starts[p.experts + 1] * columns;
  const int blocks = int((p.k + Tile::kBlockK - 1) / Tile::kBlockK);
  int expert = 0;
  const auto tile_at = [&](int index) {
    while (starts[expert + 1] * columns <= index) ++expert;
    return row_tile_of(offsets, p.experts, p.assignments, Tile::kTileM, starts, columns, expert,
                       index);
  };

  if (group == 0) {
    // --- producer
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(!kGather ? 40 : kTall ? 104 : 72));
    // Late, so that blocks that are done sooner come first; a ring ahead of where it is needed.
    // Between two loops: a branch in one would wait for the loads on their way.
    const int last = blocks > Tile::kStages ? blocks - Tile::kStages : 0;
    // The number taken before; it is on its way, and only put_next looks at it. The compiler would
    // make one atomic addition for a whole warp, and wait for it.
    uint32_t others = 0;
    const auto take = [&] {
      asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;"
                   : "=r"(others)
                   : "l"(p.taken), "r"(INT32_MAX));
    };
    const auto put_next = [&] { queue.put(int(gridDim.x + others)); };
    // Has the copy engine bring its part of a stage; one thread calls it.
    const auto load = [&](const RowTile& tile, int k) {
      const int first = int(tile.column) * kColumns;
      const uint32_t a = ring.memory(), b = a + Tile::kBytesA;
      const uint32_t arrived = ring.full + 8 * ring.stage;
      mbarrier_arrive_and_expect(arrived, kGather ? Tile::kBytesB : Tile::kStage);
      if constexpr (!kGather) tma_load(map_a, a, arrived, k, int(tile.begin), 0);
      if constexpr (kLineMajorB) {
#pragma unroll
        for (int i = 0; i < Tile::kTileN / 64; ++i) {
          tma_load(map_b, b + uint32_t(i * Tile::kBox), arrived, first + 64 * i, k, tile.group);
        }
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          constexpr int kHalf = Tile::kTileN / 2;
          const int line = kGated ? i * int(p.n) + first : first + kHalf * i;
          tma_load(map_b, b + uint32_t(i * kHalf * kSwizzleBytes), arrived, k, line, tile.group);
        }
      }
    };
    if constexpr (kGather) {
      // A thread has one 16-byte column of rows that are 16 apart.
      constexpr int kStep = 16, kRows = Tile::kTileM / kStep;
      const int row = thread / 8, chunk = thread % 8;
      const uint32_t to = uint32_t(row * kSwizzleBytes + ((chunk ^ (row % 8)) * 16));
      GroupedCopies copies;
      for (int index = int(blockIdx.x); index < tiles; index = queue.next()) {
        const RowTile tile = tile_at(index);
        const int rows = int(tile.end - tile.begin) - row;  // that are inside, from `row` on
        int32_t numbers[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          numbers[i] = kStep * i < rows ? p.order[tile.begin + row + kStep * i] : 0;
        }
        copies.hand_over<0>();  // while those are read
        const T* from[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          from[i] = static_cast<const T*>(p.a) + numbers[i] / p.rows_a.divisor * p.k + chunk * 8;
        }
        if (tile.group == p.experts) {  // empty sums
          if (thread == 0) {
            take();
            put_next();
          }
          continue;
        }
        const auto stage = [&](int k) {
          const uint32_t a = ring.memory();
          ring.wait_empty();
          if (thread == 0) load(tile, k);
          const bool inside = k + chunk * 8 < p.k;
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            cp_async(a + to + uint32_t(i * kStep * kSwizzleBytes), from[i] + k,
                     inside && kStep * i < rows ? 16 : 0);
          }
          copies.begun(ring);
          ring.advance();
        };
        int kb = 0;
        for (; kb < last; ++kb) stage(kb * Tile::kBlockK);
        if (thread == 0) take();
        for (; kb < blocks; ++kb) stage(kb * Tile::kBlockK);
        if (thread == 0) put_next();
      }
      copies.hand_over<0>();
    } else if (thread == 0) {
      for (int index = int(blockIdx.x); index < tiles;
           index = int(gridDim.x + others), queue.advance()) {
        const RowTile tile = tile_at(index);
        if (tile.group == p.experts) {  // empty sums
          take();
        } else {
          // Rows behind the tile's end, if there are any, are other experts': their sums are not
          // stored.
          int kb = 0;
          const auto stage = [&] {
            ring.wait_empty();
            load(tile, kb * Tile::kBlockK);
            ring.advance();
          };
#pragma unroll 1  // 40 registers
          for (; kb < last; ++kb) stage();
          take();
#pragma unroll 1
          for (; kb < blocks; ++kb) stage();
        }
        put_next();
      }
    }
  } else {
    // --- consumer
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kTall ? (kGather ? 136 : 152)
                                                                   : (kGather ? 216 : 232)));
    const int consumer = group - 1;
    const uint32_t box = ring.staging() + uint32_t(consumer * Tile::kBox);
    for (int index = int(blockIdx.x); index < tiles; index = queue.next()) {
      const RowTile tile = tile_at(index);
      const int rows = int(tile.end - tile.begin) - 64 * consumer;
      const int begin = int(tile.begin) + 64 * consumer;
      int32_t assignments[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        assignments[i] = grouped_row(i) < rows ? p.order[begin + grouped_row(i)] : -1;
      }
      // Used after the sums: here it would wait for the load that was just started.
      const auto rows_of_out = [&](int32_t (&to)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const bool at_position = p.at_positions && assignments[i] >= 0;
          to[i] = at_position ? begin + grouped_row(i) : assignments[i];
        }
      };
      int32_t to[4];
      const int64_t first = tile.column * kColumns;
      T* out = static_cast<T*>(p.out) + first;
      T* second = static_cast<T*>(p.second) + first;
      if (tile.group == p.experts) {
        const int64_t left = p.n - first < kColumns ? p.n - first : kColumns;
        rows_of_out(to);
        if (p.clears) clear_rows(out, p.n, to, left);
        if (p.second == nullptr) continue;
        clear_rows(second, 2 * p.n, assignments, left);
        clear_rows(second + p.n, 2 * p.n, assignments, left);
        continue;
      }
      float sums[Tile::kSums];
      grouped_sums<T, false, kLineMajorB>(ring, blocks, consumer, rows > 0, sums, [](int) {});
      if (rows <= 0) continue;
      rows_of_out(to);
#pragma unroll
      for (int i = 0; i < kColumns / 64; ++i) {
        const int64_t left = p.n - first - 64 * i;
        float values[32], ups[32];
#pragma unroll
        for (int j = 0; j < 32; ++j) {
          values[j] = sums[32 * i + j];
          if constexpr (kGated) ups[j] = sums[Tile::kSums / 2 + 32 * i + j];
        }
        if constexpr (kGated) {
          if (p.second != nullptr) {
            store_rows(box, values, second + 64 * i, 2 * p.n, assignments, left);
            store_rows(box, ups, second + p.n + 64 * i, 2 * p.n, assignments, left);
          }
#pragma unroll
          for (int j = 0; j < 32; ++j) values[j] = swiglu<T>(values[j], ups[j]);
        }
        store_rows(box, values, out + 64 * i, p.n, to, left);
      }
    }
  }
#endif
}

// --- launch -----------------------------------------------------------------------

template <class Tile, class Kernel, class... Arguments>
cudaError_t grouped_hopper_launch(Kernel kernel, int shared_bytes, int64_t tiles,
                                  cudaStream_t stream, const Arguments&... arguments) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  const int64_t sms = current_device().sms;
  const auto grid = unsigned(tiles < sms ? tiles : sms);
  // Not early: 4096 tokens took 1 to 11 % longer then (H200, 2026-11-21).
  kernel<<<grid, Tile::kThreads, unsigned(shared_bytes), stream>>>(arguments...);
  return cudaGetLastError();
}

template <class T, class Tile, bool kGated, bool kLineMajorB, bool kGather>
cudaError_t grouped_rows_hopper_launch(const GroupedRows& p, cudaStream_t stream) {
  constexpr int kColumns = kGated ? Tile::kTileN / 2 : Tile::kTileN;
  const int64_t lines = kGated ? 2 * p.n : p.n;
  TensorMap map_a{}, map_b;
  cudaError_t error =
      grouped_map<T>(map_b, p.b, kLineMajorB ? lines : p.k, kLineMajorB ? p.k : lines, p.experts,
                     kLineMajorB ? Tile::kBlockK : Tile::kTileN / 2);
  if (error != cudaSuccess) return error;
  if constexpr (!kGather) {
    error = grouped_map<T>(map_a, p.a, p.k, p.assignments, 1, Tile::kTileM);
    if (error != cudaSuccess) return error;
  }
  const int64_t tiles =
      grouped_row_tiles(p.assignments, p.experts, Tile::kTileM) * ((p.n + kColumns - 1) / kColumns);
  return grouped_hopper_launch<Tile>(
      grouped_rows_hopper_kernel<T, Tile, kGated, kLineMajorB, kGather>, Tile::shared(1), tiles,
      stream, map_a, map_b, p);
}

// grouped_rows where a, b and out have rows of whole aligned 16-byte vectors, for the products that
// a mixture has. Forward's first product and its gradient's have rows of tokens. `tall` is for
// forward's.
template <class T, bool kGated = false>
cudaError_t grouped_rows_hopper(const GroupedRows& p, bool tall, cudaStream_t stream) {
  using Even = GroupedHopper;
  using Tall = TallGroupedHopper;
  if (p.assignments == 0 || p.n == 0) return cudaSuccess;
  const bool gather = p.rows_a.gathered();
  if constexpr (kGated) {
    if (gather && !p.line_major_b) {
      return tall ? grouped_rows_hopper_launch<T, Tall, true, false, true>(p, stream)
                  : grouped_rows_hopper_launch<T, Even, true, false, true>(p, stream);
    }
  } else if (p.line_major_b) {
    return gather ? grouped_rows_hopper_launch<T, Even, false, true, true>(p, stream)
                  : grouped_rows_hopper_launch<T, Even, false, true, false>(p, stream);
  } else if (!gather) {
    return tall ? grouped_rows_hopper_launch<T, Tall, false, false, false>(p, stream)
                : grouped_rows_hopper_launch<T, Even, false, false, false>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace cuda_ops
