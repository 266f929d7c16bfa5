// The matrix product on ordinary multiply-adds: float64, float32 to the last bit
// of its rounding, and every dtype on a GPU without the tensor cores of sm_80.
// Any strides, no copies: a tile of the output per block, both inputs staged
// through two buffers of shared memory in the type that sums, a square of outputs
// per thread in registers.
#pragma once

#include "gemm/gemm_epilogue.cuh"
#include "gemm/matmul.h"
#include "ptx/planned.cuh"

namespace cuda_ops {

constexpr int kSimtThreads = 256;  // 16 x 16, each with kSquare rows and columns
constexpr int kSimtSide = 16;
constexpr int kSimtBlockK = 8;  // more of K would spill: loads of the next tile wait in registers
constexpr int kSimtFlush = 128;
constexpr int kSimtQuad = 4;  // neighboring outputs of a thread, read from shared memory at once

// One operand on its way into shared memory: `lines` (rows of a, columns of b) by
// kSimtBlockK. Threads run along whichever of the two has the smaller stride, so
// that a warp reads neighbors whether or not the matrix is transposed.
template <class T, int kBlock>
struct SimtStage {
  using C = compute_t<T>;
  static constexpr int kLoads = kBlock * kSimtBlockK / kSimtThreads;
  // 16 bytes of padding: 8 threads along K by 4 lines then hit 32 banks.
  static constexpr int kPitch = kBlock + 16 / int(sizeof(C));
  using Shared = C[kSimtBlockK][kPitch];

  const T* at;
  int64_t step;  // elements from one load to the next
  bool along_k;
  int line, k, lines_left;
  T values[kLoads];

  __device__ SimtStage(const T* data, int64_t first_line, int64_t lines, int64_t line_stride,
                       int64_t k_stride)
      : along_k(k_stride < line_stride) {
    line = int(threadIdx.x) / (along_k ? kSimtBlockK : 1) % kBlock;
    k = along_k ? int(threadIdx.x) % kSimtBlockK : int(threadIdx.x) / kBlock;
    lines_left = int(lines - first_line < kBlock ? lines - first_line : kBlock);
    at = data + (first_line + line) * line_stride + k * k_stride;
    step = along_k ? kSimtThreads / kSimtBlockK * line_stride : kSimtThreads / kBlock * k_stride;
  }

  __device__ int line_of(int load) const {
    return line + (along_k ? load * (kSimtThreads / kSimtBlockK) : 0);
  }
  __device__ int k_of(int load) const { return k + (along_k ? 0 : load * (kSimtThreads / kBlock)); }

  __device__ void load(int64_t k_left, int64_t k_stride) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const bool inside = line_of(i) < lines_left && k_of(i) < k_left;
      values[i] = inside ? at[i * step] : from_compute<T>(C(0));
    }
    at += kSimtBlockK * k_stride;
  }

  __device__ void store(Shared& shared) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      shared[k_of(i)][line_of(i)] = to_compute(values[i]);
    }
  }
};

struct SimtArgs {
  int64_t tiles_m, tiles_n, tiles;
  void* second;
};

template <class T, int kBlock, class Epilogue>
__global__ void __launch_bounds__(kSimtThreads, 2)
    gemm_simt_kernel(const __grid_constant__ Matmul p, const __grid_constant__ SimtArgs args,
                     const __grid_constant__ Epilogue epilogue) {
  if (sizeof(T) == 4 && kPlannedFrom80) return;
  using S = SimtStage<T, kBlock>;
  using C = compute_t<T>;
  const int64_t k = sizeof(T) == 2 && kPlannedFrom80 ? 0 : p.k;
  constexpr int kSquare = kBlock / kSimtSide;
  alignas(16) __shared__ typename S::Shared shared_a[2], shared_b[2];
  const int thread_m = int(threadIdx.x) / kSimtSide * kSimtQuad;
  const int thread_n = int(threadIdx.x) % kSimtSide * kSimtQuad;
  // Output i of a thread's row or column: quads lie kSimtSide * kSimtQuad apart.
  const auto spread = [](int i) { return i / kSimtQuad * (kSimtSide * kSimtQuad) + i % kSimtQuad; };

  for (int64_t tile = blockIdx.x; tile < args.tiles; tile += gridDim.x) {
    const int64_t first_m = tile % args.tiles_m * kBlock;
    const int64_t first_n = tile / args.tiles_m % args.tiles_n * kBlock;
    const auto offsets = p.batch.offsets_at(tile / args.tiles_m / args.tiles_n);
    const auto operand = [&](int i) {
      return static_cast<T*>(p.batch.operands[i].data) + offsets[i];
    };
    S a(operand(1), first_m, p.m, p.a.row, p.a.col);
    S b(operand(2), first_n, p.n, p.b.col, p.b.row);

    // Sums of kSimtFlush products are added to totals, as in gemm_fma.cuh.
    C sums[kSquare][kSquare] = {}, totals[kSquare][kSquare] = {};
    const auto flush = [&] {
#pragma unroll
      for (int i = 0; i < kSquare * kSquare; ++i) {
        totals[i / kSquare][i % kSquare] += sums[i / kSquare][i % kSquare];
        sums[i / kSquare][i % kSquare] = 0;
      }
    };
    a.load(k, p.a.col);
    b.load(k, p.b.row);
    __syncthreads();  // the last tile's buffers have been read
    a.store(shared_a[0]);
    b.store(shared_b[0]);
    int buffer = 0, unflushed = 0;
    for (int64_t k_left = k; k_left > 0; k_left -= kSimtBlockK, buffer ^= 1) {
      __syncthreads();
      // The next tile travels while this one is multiplied.
      a.load(k_left - kSimtBlockK, p.a.col);
      b.load(k_left - kSimtBlockK, p.b.row);
#pragma unroll
      for (int step = 0; step < kSimtBlockK; ++step) {
        C row[kSquare], col[kSquare];
#pragma unroll
        for (int i = 0; i < kSquare; ++i) {
          row[i] = shared_a[buffer][step][thread_m + spread(i)];
          col[i] = shared_b[buffer][step][thread_n + spread(i)];
        }
#pragma unroll
        for (int i = 0; i < kSquare; ++i) {
#pragma unroll
          for (int j = 0; j < kSquare; ++j) sums[i][j] = fma(row[i], col[j], sums[i][j]);
        }
      }
      a.store(shared_a[buffer ^ 1]);
      b.store(shared_b[buffer ^ 1]);
      if (++unflushed == kSimtFlush / kSimtBlockK) {
        flush();
        unflushed = 0;
      }
    }
    flush();

#pragma unroll
    for (int i = 0; i < kSquare; ++i) {
      const int64_t m = first_m + thread_m + spread(i);
#pragma unroll
      for (int j = 0; j < kSquare; j += 2) {
        const int64_t n = first_n + thread_n + spread(j);
        const bool inside = m < p.m;
        const Place at{offsets[0] + m * p.out.row + n, m, n, inside && n < p.n,
                       inside && n + 1 < p.n};
        C pair[2] = {totals[i][j], totals[i][j + 1]};
        finish_pair<T>(epilogue, pair, at, p.batch.operands[0].data, args.second);
      }
    }
  }
}

template <class T, class Epilogue>
cudaError_t gemm_simt(const Matmul& p, const Epilogue& epilogue, void* second,
                      cudaStream_t stream) {
  constexpr int kBlock = 4 * kSimtSide;
  SimtArgs args{(p.m + kBlock - 1) / kBlock, (p.n + kBlock - 1) / kBlock, 0, second};
  args.tiles = args.tiles_m * args.tiles_n * p.batch.numel;
  // One dim for everything: y and z end at 65535. Blocks step over the rest.
  const int64_t grid = args.tiles < INT32_MAX ? args.tiles : INT32_MAX;
  gemm_simt_kernel<T, kBlock, Epilogue>
      <<<unsigned(grid), kSimtThreads, 0, stream>>>(p, args, epilogue);
  return cudaGetLastError();
}

}  // namespace cuda_ops
