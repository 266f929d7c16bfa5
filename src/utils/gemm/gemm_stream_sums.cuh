// The products of lines of a large matrix and a few vectors, all K-major, by one warp: the
// matrix is read once, past the L1 cache, and tensor cores keep up with any way of using
// them.
//
// mma.sync has the matrix as its 16 rows and vectors as its 8 columns. It adds up
// over k in whatever order both come, so a lane loads 16 bytes of a line straight into
// registers, and those are its share of two instructions:
//
//   32 k's of one line      lane % 4 = 0   1         2          3
//                           0 1 ... 7      8 ... 15  16 ... 23  24 ... 31
//   k's 0 to 3 of a lane: the first instruction, k's 4 to 7: the second
//
// Eight loads of the matrix a lane are on their way at once, 4 KB a warp.
#pragma once

#include "gemm/gemm_mma.cuh"
#include "gemm/gemm_stream.h"
#include "ptx/early_start.cuh"

namespace cuda_ops {

// The k's of part `part` of `parts`.
struct StreamRange {
  int begin, end;
  __device__ StreamRange(int k, int part, int parts) {
    const int share = ((k + 31) / 32 + parts - 1) / parts * 32;
    begin = part * share;
    end = k - begin < share ? k : begin + share;
  }
};

// Loads 16 bytes that are not read again, and the rest of their 128 into the L2 cache.
__device__ inline uint4 load_once(const void* from) {
  uint4 word;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "l"(from));
  return word;
}

// Adds the products of 32 k's.
template <class T, int kBlocks, int kCols>
__device__ __forceinline__ void stream_products(const uint4 (&lines)[kBlocks][2],
                                                const uint4 (&vectors)[kCols],
                                                float (&sums)[kBlocks][kCols][4]) {
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const uint4 low = lines[b][0], high = lines[b][1];
    const uint32_t early[4] = {low.x, high.x, low.y, high.y};
    const uint32_t late[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
    for (int c = 0; c < kCols; ++c) {
      mma(sums[b][c], early, vectors[c].x, vectors[c].y, T{});
      mma(sums[b][c], late, vectors[c].z, vectors[c].w, T{});
    }
  }
}

// The part of the matrix that a lane has on its way at once: 32 k's in each step.
template <int kBlocks>
struct StreamLines {
  static constexpr int kSteps = 4 / kBlocks;
  uint4 words[kSteps][kBlocks][2];

  // Loads from k = 8 * (lane % 4) on, `left` k's before the end. `fresh`: past any cache but L2,
  // for a kernel that has not waited for the one before.
  template <bool kFresh = false, class T>
  __device__ __forceinline__ void load(const T* (&lines)[kBlocks][2], int left) {
    const int own = int(threadIdx.x) % 4 * 8;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int i = 0; i < 2 * kBlocks; ++i) {
        const T* from = lines[i / 2][i % 2] + 32 * s;
        words[s][i / 2][i % 2] = own + 32 * s >= left ? uint4{}
                                 : kFresh             ? load_fresh(from)
                                                      : load_once(from);
      }
    }
  }
};

// Adds the products of a range of k. `lines[b]` are those of this lane in block b, lines
// lane / 4 and lane / 4 + 8, `vectors[c]` is vector 8 * c + lane / 4: all of them from
// k = range.begin + 8 * (lane % 4) on. The whole warp calls it; moves the pointers. `loaded`: the
// first words are there.
template <class T, int kBlocks, int kCols>
__device__ __forceinline__ void stream_sums(const T* (&lines)[kBlocks][2],
                                            const T* (&vectors)[kCols], const StreamRange& range,
                                            float (&sums)[kBlocks][kCols][4],
                                            StreamLines<kBlocks>& line, bool loaded) {
  constexpr int kSteps = StreamLines<kBlocks>::kSteps, kLoad = 32 * kSteps;
  const int own = int(threadIdx.x) % 4 * 8;
#pragma unroll 1
  for (int left = range.end - range.begin; left > 0; left -= kLoad) {
    if (!loaded) line.load(lines, left);
    loaded = false;
    uint4 vector[kSteps][kCols];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int c = 0; c < kCols; ++c) {
        const auto* from = reinterpret_cast<const uint4*>(vectors[c] + 32 * s);
        vector[s][c] = own + 32 * s < left ? __ldg(from) : uint4{};
      }
    }
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) lines[i / 2][i % 2] += kLoad;
#pragma unroll
    for (int c = 0; c < kCols; ++c) vectors[c] += kLoad;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) stream_products<T>(line.words[s], vector[s], sums);
  }
}

template <class T, int kBlocks, int kCols>
__device__ __forceinline__ void stream_sums(const T* (&lines)[kBlocks][2],
                                            const T* (&vectors)[kCols], const StreamRange& range,
                                            float (&sums)[kBlocks][kCols][4]) {
  StreamLines<kBlocks> line;
  stream_sums(lines, vectors, range, sums, line, false);
}

}  // namespace cuda_ops
