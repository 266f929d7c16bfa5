// The way out of a Hopper kernel's sums: through shared memory, in boxes of 64 rows by 128 bytes,
// swizzled as tma.cuh draws it.
#pragma once

#include "gemm/gemm_epilogue.cuh"
#include "ptx/tma.cuh"

namespace cuda_ops {

// Two neighbors of a row of out, in one register or two.
template <class Out>
using OutPair = decltype(from_compute(0.f, 0.f, Out{}));

// Writes one 64-row box of 128 bytes, as tma.cuh draws it, from the results of a warpgroup.
template <class Out, int kCount>
__device__ void write_box(uint32_t box_at, const OutPair<Out> (&pairs)[kCount]) {
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32 % 4;
  if constexpr (sizeof(Out) == 2) {
    // stmatrix: lane l gives the address of row l % 8 of the 8 x 8 matrix l / 8, the
    // matrices being rows 0-7, 8-15 of one 16-byte column and of the next.
    const int row = 16 * warp + lane % 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int chunk = 2 * i + lane / 16;
      const uint32_t at = box_at + uint32_t(row * kSwizzleBytes + ((chunk ^ (row % 8)) * 16));
      const OutPair<Out>* p = pairs + 4 * i;
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
                   "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3])
                   : "memory");
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = 16 * warp + lane / 4 + 8 * (i % 2);
      const int chunk = i / 2 * 2 + lane % 4 / 2;
      const uint32_t at =
          box_at + uint32_t(row * kSwizzleBytes + ((chunk ^ (row % 8)) * 16) + lane % 2 * 8);
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(pairs[i].x), "f"(pairs[i].y)
                   : "memory");
    }
  }
}

// The same turned over: the box's rows are the 64 columns, each of the warpgroup's 64 rows.
template <class Out, int kCount>
__device__ void write_box_transposed(uint32_t box_at, const OutPair<Out> (&pairs)[kCount]) {
  static_assert(sizeof(Out) == 2 && kCount == 16, "matrices are turned over in 16 bits");
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32 % 4;
  // The matrices of write_box, whose columns are rows here: lane l gives the address of
  // column l % 8 of matrix l / 8.
  const int chunk = 2 * warp + lane / 8 % 2;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = 16 * i + lane / 16 * 8 + lane % 8;
    const uint32_t at = box_at + uint32_t(row * kSwizzleBytes + ((chunk ^ (row % 8)) * 16));
    const OutPair<Out>* p = pairs + 4 * i;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
                 "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3])
                 : "memory");
  }
}

// Fills a box either way, by the threads of warpgroup `consumer`; its thread 0 then has the copy
// engine read the box. All stores of that thread but the last have been read.
template <class Out, bool kTransposed = false, int kCount>
__device__ void fill_box(uint32_t box_at, const OutPair<Out> (&pairs)[kCount], int consumer) {
  if (threadIdx.x % 128 == 0) tma_store_wait_read<1>();
  named_barrier(1 + consumer, 128);
  if constexpr (kTransposed) {
    write_box_transposed<Out>(box_at, pairs);
  } else {
    write_box<Out>(box_at, pairs);
  }
  tma_store_fence();
  named_barrier(1 + consumer, 128);
}

// Copies a box to rows of out, `stride` elements apart, that do not start at multiples of 16 bytes:
// by the warpgroup's threads, each warp along one row at a time.
template <class Out>
__device__ void copy_box(Out* out, int64_t stride, int rows, int columns, uint32_t box_at,
                         int first_m, int first_n) {
  constexpr int kColumns = kSwizzleBytes / int(sizeof(Out));
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32 % 4;
  for (int row = warp; row < 64 && first_m + row < rows; row += 4) {
#pragma unroll
    for (int col = lane; col < kColumns; col += 32) {
      const int byte = col * int(sizeof(Out)), chunk = byte / 16;
      const uint32_t at =
          box_at + uint32_t(row * kSwizzleBytes + ((chunk ^ (row % 8)) * 16) + byte % 16);
      Out value;
      if constexpr (sizeof(Out) == 2) {
        asm volatile("ld.shared.b16 %0, [%1];" : "=h"(value.bits) : "r"(at) : "memory");
      } else {
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(at) : "memory");
      }
      const int n = first_n + col;
      if (n < columns) out[(first_m + row) * stride + n] = value;
    }
  }
}

}  // namespace cuda_ops
