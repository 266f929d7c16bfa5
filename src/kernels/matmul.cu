// out = a @ b for one matrix or for a batch, any strides, no copies. The plain
// kernel: a tile of the output per block, both inputs staged through shared
// memory in the type that sums, a square of outputs per thread in registers.
#include "dtype.cuh"
#include "matmul.h"

using namespace cuda_ops;

namespace {

constexpr int kThreads = 256;  // 16 x 16, each with kSquare rows and columns
constexpr int kSide = 16;
constexpr int kBlockK = 8;  // more of K would spill: loads of the next tile wait in registers
constexpr int kQuad = 4;    // neighbouring outputs of a thread, read from shared memory at once

// --- the launch configuration: a value, chosen without a GPU ------------------

struct MatmulConfig {
  int block = 0;  // rows and columns of a tile
  int64_t tiles_m = 0, tiles_n = 0, tiles = 0;
  int64_t grid = 0;
};

// An 8 x 8 square per thread does 64 multiply-adds for 16 values from shared
// memory, a 4 x 4 square 16 for 8; the small one serves where large tiles would
// leave SMs idle (132 on an H200), and float64, whose sums take two registers.
MatmulConfig matmul_config(const Matmul& p) {
  const auto split = [&](int block) {
    MatmulConfig config{block, (p.m + block - 1) / block, (p.n + block - 1) / block};
    config.tiles = config.tiles_m * config.tiles_n * p.batch.numel;
    // One dim for everything: y and z end at 65535. Blocks step over the rest.
    config.grid = config.tiles < INT32_MAX ? config.tiles : INT32_MAX;
    return config;
  };
  const MatmulConfig large = split(8 * kSide);
  return p.batch.dtype != DType::kFloat64 && large.tiles >= 132 ? large : split(4 * kSide);
}

// --- kernel -------------------------------------------------------------------

// One operand's way into shared memory: `lines` (rows of a, columns of b) by
// kBlockK. Threads run along whichever of the two has the smaller stride, so
// that a warp reads neighbours whether or not the matrix is transposed.
template <class T, int kBlock>
struct Stage {
  using C = compute_t<T>;
  static constexpr int kLoads = kBlock * kBlockK / kThreads;
  // 16 bytes of padding: 8 threads along K by 4 lines then hit 32 banks.
  static constexpr int kPitch = kBlock + 16 / int(sizeof(C));
  using Shared = C[kBlockK][kPitch];

  const T* at;
  int64_t step;  // elements from one load to the next
  bool along_k;
  int line, k, lines_left;
  T values[kLoads];

  __device__ Stage(const T* data, int64_t first_line, int64_t lines, int64_t line_stride,
                   int64_t k_stride)
      : along_k(k_stride < line_stride) {
    line = int(threadIdx.x) / (along_k ? kBlockK : 1) % kBlock;
    k = along_k ? int(threadIdx.x) % kBlockK : int(threadIdx.x) / kBlock;
    lines_left = int(lines - first_line < kBlock ? lines - first_line : kBlock);
    at = data + (first_line + line) * line_stride + k * k_stride;
    step = along_k ? kThreads / kBlockK * line_stride : kThreads / kBlock * k_stride;
  }

  __device__ int line_of(int load) const {
    return line + (along_k ? load * (kThreads / kBlockK) : 0);
  }
  __device__ int k_of(int load) const { return k + (along_k ? 0 : load * (kThreads / kBlock)); }

  __device__ void load(int64_t k_left, int64_t k_stride) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const bool inside = line_of(i) < lines_left && k_of(i) < k_left;
      values[i] = inside ? at[i * step] : from_compute<T>(C(0));
    }
    at += kBlockK * k_stride;
  }

  __device__ void store(Shared& shared) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      shared[k_of(i)][line_of(i)] = to_compute(values[i]);
    }
  }
};

template <class T, int kBlock>
__global__ void __launch_bounds__(kThreads, 2)
    matmul_kernel(const __grid_constant__ Matmul p, const __grid_constant__ MatmulConfig config) {
  using S = Stage<T, kBlock>;
  using C = compute_t<T>;
  constexpr int kSquare = kBlock / kSide;
  alignas(16) __shared__ typename S::Shared shared_a, shared_b;
  const int thread_m = int(threadIdx.x) / kSide * kQuad;
  const int thread_n = int(threadIdx.x) % kSide * kQuad;
  // Output i of a thread's row or column: quads lie kSide * kQuad apart.
  const auto spread = [](int i) { return i / kQuad * (kSide * kQuad) + i % kQuad; };

  for (int64_t tile = blockIdx.x; tile < config.tiles; tile += gridDim.x) {
    const int64_t first_m = tile % config.tiles_m * kBlock;
    const int64_t first_n = tile / config.tiles_m % config.tiles_n * kBlock;
    const auto offsets = p.batch.offsets_at(tile / config.tiles_m / config.tiles_n);
    const auto operand = [&](int i) {
      return static_cast<T*>(p.batch.operands[i].data) + offsets[i];
    };
    S a(operand(1), first_m, p.m, p.a.row, p.a.col);
    S b(operand(2), first_n, p.n, p.b.col, p.b.row);

    C sums[kSquare][kSquare] = {};
    a.load(p.k, p.a.col);
    b.load(p.k, p.b.row);
    for (int64_t k_left = p.k; k_left > 0; k_left -= kBlockK) {
      a.store(shared_a);
      b.store(shared_b);
      __syncthreads();
      // The next tile travels while this one is multiplied.
      a.load(k_left - kBlockK, p.a.col);
      b.load(k_left - kBlockK, p.b.row);
#pragma unroll
      for (int k = 0; k < kBlockK; ++k) {
        C row[kSquare], col[kSquare];
#pragma unroll
        for (int i = 0; i < kSquare; ++i) {
          row[i] = shared_a[k][thread_m + spread(i)];
          col[i] = shared_b[k][thread_n + spread(i)];
        }
#pragma unroll
        for (int i = 0; i < kSquare; ++i) {
#pragma unroll
          for (int j = 0; j < kSquare; ++j) sums[i][j] = fma(row[i], col[j], sums[i][j]);
        }
      }
      __syncthreads();
    }

    T* out = operand(0);
#pragma unroll
    for (int i = 0; i < kSquare; ++i) {
      const int64_t m = first_m + thread_m + spread(i);
#pragma unroll
      for (int j = 0; j < kSquare; ++j) {
        const int64_t n = first_n + thread_n + spread(j);
        if (m < p.m && n < p.n) out[m * p.out.row + n * p.out.col] = from_compute<T>(sums[i][j]);
      }
    }
  }
}

}  // namespace

// -----------------------------------------------------------------------------

cudaError_t matmul_launch(const Matmul& problem, cudaStream_t stream) {
  const MatmulConfig config = matmul_config(problem);
  if (config.tiles == 0) return cudaSuccess;
  return visit_floating(problem.batch.dtype, [&](auto tag) {
    using T = decltype(tag);
    void (*kernel)(Matmul, MatmulConfig) = matmul_kernel<T, 4 * kSide>;
    if constexpr (sizeof(T) < 8) {
      if (config.block == 8 * kSide) kernel = matmul_kernel<T, 8 * kSide>;
    }
    kernel<<<unsigned(config.grid), kThreads, 0, stream>>>(problem, config);
    return cudaGetLastError();
  });
}
