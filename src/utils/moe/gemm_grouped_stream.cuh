// Products of a mixture of experts with few rows each: matrices are read once, at the
// memory's bandwidth, and tensor cores keep up with any way of using them.
//
//   block   8 warps, one tile of up to 8 * kCols assignments of one expert; `splits`
//           warps share the K of the same lines of its matrix
//   warp    kBlocks times 16 lines, of a gated product 8 gates and their 8 ups
//
// gemm_stream_sums.cuh has the loop, 64 or 96 KB of loads an SM on their way at once. Partial sums
// meet in shared memory and are added in the order of the warps.
#pragma once

#include "moe/gemm_grouped.cuh"
#include "gemm/gemm_stream_sums.cuh"
#include "moe/moe_plan.h"

namespace cuda_ops {

struct StreamRows {
  GroupedRows rows;
  MoeMap map;
  bool sorted;  // by the map; else each block looks for the assignments of its expert
  int splits;
  // Where the kernel before is the first product, which has itself waited for the kernels that
  // chose the experts and wrote the matrices: as many blocks as the device holds read them while it
  // still runs.
  unsigned early_blocks = 0;
};

// --- the tile -----------------------------------------------------------------

struct StreamTile {
  int group, count;  // count 0: nothing to do
  int column;
};

// Finds the block's tile and lists its assignments. The whole block calls it, and all of
// it returns the same. `early`: called before the wait for the kernel before, without a map.
template <int kTile>
__device__ StreamTile stream_tile_of(const StreamRows& s, int columns, int32_t* members,
                                     bool early) {
  const GroupedRows& p = s.rows;
  const int thread = int(threadIdx.x), lane = thread % 32;
  if (s.sorted) {
    __shared__ int32_t starts[kMostBins + 1], offsets[kMostBins];
    for (int i = thread; i <= p.experts; i += int(blockDim.x)) offsets[i] = p.offsets[i];
    __syncthreads();
    add_up_tiles(offsets, p.experts, p.assignments, kTile, starts);
    if (blockIdx.x >= unsigned(starts[p.experts + 1] * columns)) return {0, 0, 0};
    const RowTile tile =
        row_tile(offsets, p.experts, p.assignments, kTile, starts, columns, blockIdx.x);
    const int count = int(tile.end - tile.begin);
    if (thread < count) members[thread] = p.order[tile.begin + thread];
    __syncthreads();
    return {tile.group, count, int(tile.column)};
  }
  // The first assignment of an expert, and every kTile-th after it, has a block. The
  // others have none.
  const int own = int(blockIdx.x / unsigned(columns));
  const auto bin_at = [&](int i) { return early ? fresh_bin_of(s.map, i) : bin_of(s.map, i); };
  const int group = bin_at(own);
  const auto alike_at = [&](int i) { return i < p.assignments && bin_at(i) == group; };
  const uint32_t low = __ballot_sync(~0u, alike_at(lane));
  const uint32_t high = __ballot_sync(~0u, alike_at(lane + 32));
  const uint64_t alike = uint64_t(high) << 32 | low;
  const auto rank = [&](int i) { return __popcll(alike & ((uint64_t(1) << i) - 1)); };
  const int first = rank(own), left = __popcll(alike) - first;
  if (first % kTile != 0) return {0, 0, 0};
  if (thread < int(kMostUnsorted) && (alike >> thread & 1) != 0) {
    const int at = rank(thread) - first;
    if (at >= 0 && at < kTile) members[at] = thread;
  }
  __syncthreads();
  return {group, left < kTile ? left : kTile, int(blockIdx.x % unsigned(columns))};
}

// --- kernels ------------------------------------------------------------------

template <class T, int kCols, int kBlocks, bool kGated>
__global__ void __launch_bounds__(32 * kStreamWarps, stream_resident(8 * kCols))
    stream_rows_kernel(const __grid_constant__ StreamRows s) {
#if __CUDA_ARCH__ >= 800
  // Columns of out that 16 lines make; quads of sums that a lane has.
  constexpr int kStep = kGated ? 8 : 16, kQuads = kBlocks * kCols;
  __shared__ int32_t members[8 * kCols];
  __shared__ float4 partials[kStreamWarps][kQuads][32];
  const GroupedRows& p = s.rows;
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  const int part = warp % s.splits, place = warp / s.splits;
  const int width = kStreamWarps / s.splits * kBlocks * kStep;
  // Most blocks that start before the kernel before is done; their early reads are not cached.
  const bool early = !kGated && !s.sorted && blockIdx.x < s.early_blocks;
  const void* rows = p.a;
  if (!early) {
    rows = after_previous(rows);
    let_next_start();
  }
  const int columns = (int(p.n) + width - 1) / width;
  const StreamTile tile = stream_tile_of<8 * kCols>(s, columns, members, early);
  if (tile.count == 0) return;

  const int first = int(tile.column) * width + place * kBlocks * kStep, size = int(p.n);
  const StreamRange range(int(p.k), part, s.splits);
  const int from = range.begin + lane % 4 * 8;
  const T *lines[kBlocks][2], *vectors[kCols];
  const T* matrix = static_cast<const T*>(p.b) + tile.group * (kGated ? 2 * p.n : p.n) * p.k;
  // A line or an assignment beyond the last one is that one again, and not stored.
#pragma unroll
  for (int i = 0; i < 2 * kBlocks; ++i) {
    const int n = first + i / 2 * kStep + lane / 4 + (kGated ? 0 : i % 2 * 8);
    const int line = (n < size ? n : size - 1) + (kGated ? i % 2 * size : 0);
    lines[i / 2][i % 2] = matrix + line * p.k + from;
  }
  const bool wanted = tile.group < p.experts && first < size;
  StreamLines<kBlocks> ahead;
  if (early) {
    if (wanted) ahead.template load<true>(lines, range.end - range.begin);
    rows = after_previous(rows);
    let_next_start();
  }
#pragma unroll
  for (int c = 0; c < kCols; ++c) {
    const int at = 8 * c + lane / 4, member = members[at < tile.count ? at : tile.count - 1];
    vectors[c] = static_cast<const T*>(rows) + member / p.rows_a.divisor * p.k + from;
  }
  float sums[kBlocks][kCols][4] = {};
  if (wanted) stream_sums(lines, vectors, range, sums, ahead, early);

#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const float (&quad)[4] = sums[i / kCols][i % kCols];
    partials[warp][i][lane] = make_float4(quad[0], quad[1], quad[2], quad[3]);
  }
  __syncthreads();
  T* out = static_cast<T*>(p.out);
  T* second = static_cast<T*>(p.second);
  for (int i = part; i < kQuads; i += s.splits) {
    float quad[4] = {};
    for (int w = 0; w < s.splits; ++w) {
      const float4 one = partials[place * s.splits + w][i][lane];
      quad[0] += one.x, quad[1] += one.y, quad[2] += one.z, quad[3] += one.w;
    }
    const int n = first + i / kCols * kStep + lane / 4;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int at = i % kCols * 8 + lane % 4 * 2 + j;
      if (at >= tile.count) continue;
      const int64_t assignment = members[at];
      if constexpr (kGated) {
        if (n >= size) continue;
        out[assignment * p.n + n] = from_compute<T>(swiglu<T>(quad[j], quad[j + 2]));
        if (second == nullptr) continue;
        second[assignment * 2 * p.n + n] = from_compute<T>(quad[j]);
        second[assignment * 2 * p.n + p.n + n] = from_compute<T>(quad[j + 2]);
      } else {
        if (n < size) out[assignment * p.n + n] = from_compute<T>(quad[j]);
        if (n + 8 < size) out[assignment * p.n + n + 8] = from_compute<T>(quad[j + 2]);
      }
    }
  }
#endif
}

constexpr int kTokenWarps = 16;

// The second product of one token and the sum of its results, which then need no memory: a
// block has 16 lines of the matrices of all of the token's experts.
// The launch bounds ask for one block: without them the compiler saves registers by loads one after
// the other.
template <class T>
__global__ void __launch_bounds__(32 * kTokenWarps, 1)
    stream_token_kernel(const __grid_constant__ GroupedRows p, const __grid_constant__ MoeMap map,
                        const float* weights, int parts) {
#if __CUDA_ARCH__ >= 800
  __shared__ float partials[kMostChosen * kTokenWarps][16], scales[kMostChosen];
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  const int64_t first = int64_t(blockIdx.x) * 16;
  const T* lines[1][2];
  // The part of the pair's K, and the lane's lines of it.
  const auto range_of = [&](int pair, int expert) {
    const StreamRange range(int(p.k), pair % parts, parts);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t n = first + lane / 4 + 8 * half;
      const int64_t line = expert * p.n + (n < p.n ? n : p.n - 1);
      lines[0][half] = static_cast<const T*>(p.b) + line * p.k + range.begin + lane % 4 * 8;
    }
    return range;
  };
  // Loads of the first lines start while the first product still runs.
  const int pairs = p.assignments * parts;
  StreamLines<1> ahead;
  int ahead_of = p.experts;
  if (warp < pairs) ahead_of = fresh_bin_of(map, warp / parts);
  if (ahead_of < p.experts) {
    const StreamRange range = range_of(warp, ahead_of);
    ahead.load<true>(lines, range.end - range.begin);
  }
  const void* rows = after_previous(p.a);
  let_next_start();
  if (int(threadIdx.x) < p.assignments) scales[threadIdx.x] = weights[threadIdx.x];
  for (int pair = warp; pair < pairs; pair += kTokenWarps) {
    const int assignment = pair / parts;
    const bool loaded = pair == warp;
    const int expert = loaded ? ahead_of : bin_of(map, assignment);
    float sums[1][1][4] = {};
    if (expert < p.experts) {
      const StreamRange range = range_of(pair, expert);
      const T* vectors[1] = {static_cast<const T*>(rows) + assignment * p.k + range.begin +
                             lane % 4 * 8};
      stream_sums(lines, vectors, range, sums, ahead, loaded);
    }
    // All eight columns are the same.
    if (lane % 4 == 0) {
      partials[pair][lane / 4] = sums[0][0][0];
      partials[pair][lane / 4 + 8] = sums[0][0][2];
    }
  }
  __syncthreads();
  const int64_t n = first + threadIdx.x;
  if (threadIdx.x >= 16 || n >= p.n) return;
  float total = 0;
  for (int assignment = 0; assignment < p.assignments; ++assignment) {
    float sum = 0;
    for (int part = 0; part < parts; ++part)
      sum += partials[assignment * parts + part][threadIdx.x];
    total += scales[assignment] * sum;
  }
  static_cast<T*>(p.out)[n] = from_compute<T>(total);
#endif
}

// --- launch -------------------------------------------------------------------

template <class T, bool kGated>
cudaError_t stream_rows(const StreamRows& s, int tile, cudaStream_t stream) {
  const GroupedRows& p = s.rows;
  if (p.assignments == 0) return cudaSuccess;
  const int width = kStreamWarps / s.splits * stream_lines(tile) / (kGated ? 2 : 1);
  const int64_t rows = s.sorted ? grouped_row_tiles(p.assignments, p.experts, tile) : p.assignments;
  const auto kernel = tile == 8    ? stream_rows_kernel<T, 1, 1, kGated>
                      : tile == 16 ? stream_rows_kernel<T, 2, 2, kGated>
                                   : stream_rows_kernel<T, 4, 2, kGated>;
  const int64_t blocks = rows * ((p.n + width - 1) / width);
  return launch_early(kernel, unsigned(blocks), 32 * kStreamWarps, 0, stream, s);
}

// `p.out` is one row: the sum over all assignments. The kernel before is the first product, as
// where StreamRows has early_blocks.
template <class T>
cudaError_t stream_token(const GroupedRows& p, const MoeMap& map, const void* weights,
                         cudaStream_t stream) {
  // All warps have the same number of pairs, a power of two of them for an assignment.
  int parts = 1;
  while (parts < kTokenWarps && p.assignments * parts % kTokenWarps != 0) parts *= 2;
  return launch_early(stream_token_kernel<T>, unsigned((p.n + 15) / 16), 32 * kTokenWarps, 0,
                      stream, p, map, static_cast<const float*>(weights), parts);
}

}  // namespace cuda_ops
