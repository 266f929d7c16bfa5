// Copies operands into the form of gemm_pack.h: both in one launch, at the memory's
// bandwidth.
//
//   block   64 lines x 64 k's through shared memory, 256 threads
//   reads   along the lines or along K, whichever lie closer: whole sectors of any layout
//   writes  16 bytes a thread along K
#pragma once

#include "dtype.cuh"
#include "gemm/gemm_pack.h"
#include "ptx/tf32.cuh"

namespace cuda_ops {

constexpr int kPackSide = 64, kPackThreads = 256;

struct PackCopy {
  const void* from;
  void* to;
  int64_t lines, line_stride, k_stride;
  unsigned tiles_lines, tiles_k, blocks;
  bool along_k;  // reads along K, else along the lines
};

struct PackArgs {
  PackCopy a, b;       // without blocks: no such copy
  int64_t part, line;  // elements of a copy: of a line's part, and to the next line
};

template <class T, bool kSplit>
__global__ void __launch_bounds__(kPackThreads)
    gemm_pack_kernel(const __grid_constant__ Matmul p, const __grid_constant__ PackArgs args) {
  using Word = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;
  constexpr int kPerWord = 4 / int(sizeof(Word)), kVector = 16 / int(sizeof(Word));
  constexpr int kStep = kPackThreads / kPackSide, kLoads = kPackSide / kStep;
  // Padded by a word: neighbors in a column are in different banks.
  alignas(16) __shared__ Word tile[kPackSide][kPackSide + kPerWord];

  const bool of_b = blockIdx.x >= args.a.blocks;
  const PackCopy& copy = of_b ? args.b : args.a;
  const unsigned block = blockIdx.x - (of_b ? args.a.blocks : 0);
  // Blocks that run side by side read on where another one ends.
  const bool along_k = copy.along_k;
  const unsigned quick = along_k ? copy.tiles_k : copy.tiles_lines;
  const unsigned matrix_tiles = copy.tiles_k * copy.tiles_lines;
  const int64_t matrix = block / matrix_tiles;
  const unsigned in_matrix = block % matrix_tiles;
  const int64_t first_line = int64_t(along_k ? in_matrix / quick : in_matrix % quick) * kPackSide;
  const int64_t first_k = int64_t(along_k ? in_matrix % quick : in_matrix / quick) * kPackSide;

  const int inner = int(threadIdx.x) % kPackSide, outer = int(threadIdx.x) / kPackSide;
  const int line = along_k ? outer : inner, k = along_k ? inner : outer;
  const int64_t lines_left = copy.lines - first_line - line, k_left = p.k - first_k - k;
  const int64_t step = kStep * (along_k ? copy.line_stride : copy.k_stride);
  const auto offsets = p.batch.offsets_at(matrix);
  const Word* from = static_cast<const Word*>(copy.from) + (of_b ? offsets[2] : offsets[1]) +
                     (first_line + line) * copy.line_stride + (first_k + k) * copy.k_stride;
  Word values[kLoads];  // all on their way at once
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int ahead = i * kStep;
    const bool inside = lines_left > (along_k ? ahead : 0) && k_left > (along_k ? 0 : ahead);
    values[i] = inside ? from[i * step] : Word(0);
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    tile[line + (along_k ? i * kStep : 0)][k + (along_k ? 0 : i * kStep)] = values[i];
  }
  __syncthreads();

  constexpr int kVectors = kPackSide * kPackSide / kVector / kPackThreads;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int index = int(threadIdx.x) + i * kPackThreads;
    const int row = index / (kPackSide / kVector), column = index % (kPackSide / kVector) * kVector;
    if (first_line + row >= copy.lines || first_k + column >= args.part) continue;
    const auto* words = reinterpret_cast<const uint32_t*>(&tile[row][column]);
    Word* to = static_cast<Word*>(copy.to) + (matrix * copy.lines + first_line + row) * args.line +
               first_k + column;
    uint32_t high[4] = {words[0], words[1], words[2], words[3]};
    if constexpr (kSplit) {
#if __CUDA_ARCH__ >= 800
      uint32_t low[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) split_tf32(words[w], high[w], low[w]);
      __stwb(reinterpret_cast<uint4*>(to + args.part), make_uint4(low[0], low[1], low[2], low[3]));
#endif
    }
    // Names the instruction: nvcc makes four stores of a plain one here.
    __stwb(reinterpret_cast<uint4*>(to), make_uint4(high[0], high[1], high[2], high[3]));
  }
}

// Makes the copies of `p`, the problem as gemm_pack.h's functions were given it.
template <class T>
cudaError_t gemm_pack(const Matmul& p, const GemmPack& pack, void* workspace, cudaStream_t stream) {
  const auto copy_of = [&](int operand, bool wanted, int64_t lines, int64_t line, int64_t k,
                           int64_t skipped) {
    PackCopy copy{};
    copy.from = p.batch.operands[operand].data;
    copy.to = static_cast<char*>(workspace) + skipped;
    copy.lines = lines;
    copy.line_stride = line;
    copy.k_stride = k;
    copy.along_k = k == 1 || (line != 1 && k <= line);
    copy.tiles_lines = unsigned(ceil_div(lines, kPackSide));
    copy.tiles_k = unsigned(ceil_div(p.k, kPackSide));
    if (wanted) {
      copy.blocks = copy.tiles_lines * copy.tiles_k * unsigned(packed_matrices(p, operand));
    }
    return copy;
  };
  PackArgs args{};
  args.a = copy_of(1, pack.a, p.m, p.a.row, p.a.col, 0);
  args.b = copy_of(2, pack.b, p.n, p.b.col, p.b.row, pack.bytes_a);
  args.part = packed_part(p);
  args.line = packed_line(p);
  auto kernel = gemm_pack_kernel<T, false>;
  if constexpr (sizeof(T) == 4) {
    if (is_split(p)) kernel = gemm_pack_kernel<T, true>;
  }
  kernel<<<args.a.blocks + args.b.blocks, kPackThreads, 0, stream>>>(p, args);
  return cudaGetLastError();
}

}  // namespace cuda_ops
