// Tunes float32: times every tile of the kernel of ordinary multiply-adds as one block on each SM,
// and as two, and prints what kFmaTiles of gemm_fma.h should be. There is one pair of row-major
// operands, so that the L2 cache is warm. Takes seconds on an H200.
//
//   nvcc -std=c++17 --expt-relaxed-constexpr -gencode=arch=compute_90a,code=sm_90a
//        -I src/utils -o /tmp/multiply_adds benchmarks/tuning/multiply_adds.cu &&
//        /tmp/multiply_adds
#include "gemm/gemm_epilogue.cuh"
#include "gemm/gemm_fma.cuh"
#include "ptx/capability.h"
#include "race.cuh"

using namespace cuda_ops;

namespace {

constexpr int64_t kElements = int64_t(64) << 20;

struct Memory {
  float *a, *b, *out;
};

Matmul product(const Memory& memory, int64_t m, int64_t n, int64_t k) {
  Matmul p;
  p.m = m, p.n = n, p.k = k;
  p.out = p.b = {n, 1};
  p.a = {k, 1};
  p.batch.dtype = DType::kFloat32;
  p.batch.numel = 1;
  p.batch.operands[0].data = memory.out;
  p.batch.operands[1].data = memory.a;
  p.batch.operands[2].data = memory.b;
  return p;
}

// Returns the microseconds of tiles for `blocks` blocks on each of the SMs.
double time_tile(const Memory& memory, const FmaTileTime& tile, int blocks, int64_t k,
                 cudaStream_t stream) {
  // The 132 SMs of an H200 are 12 rows of 11 tiles.
  const Matmul p = product(memory, 12 * tile.rows, blocks * 11 * tile.columns, k);
  const FmaConfig config = fma_config(p, tile, current_device(), false);
  Race race(stream);
  const bool ran = race.add(1, 20, [&](int) {
    return gemm_fma<false>(p, config, PlainEpilogue{}, nullptr, stream) == cudaSuccess;
  });
  return ran ? race.run()[0] : NAN;
}

}  // namespace

int main() {
  cudaStream_t stream;
  Memory memory{};
  check(cudaStreamCreate(&stream), "stream");
  for (float** matrix : {&memory.a, &memory.b, &memory.out}) {
    check(cudaMalloc(matrix, kElements * sizeof(float)), "memory");
    fill_kernel<<<1024, 256, 0, stream>>>(reinterpret_cast<uint32_t*>(*matrix), kElements);
  }
  check(cudaStreamSynchronize(stream), "fill");
  std::printf("%-10s %21s %25s %25s\n", "", "us to start and end", "us for a k",
              "and of two blocks");
  for (const FmaTileTime& tile : kFmaTiles) {
    constexpr int64_t kShort = 256, kLong = 2048;
    const double shorter = time_tile(memory, tile, 1, kShort, stream);
    const double each = (time_tile(memory, tile, 1, kLong, stream) - shorter) / (kLong - kShort);
    const double two =
        (time_tile(memory, tile, 2, kLong, stream) - time_tile(memory, tile, 2, kShort, stream)) /
        (kLong - kShort);
    std::printf("%4d x %-4d %7.1f, estimated %4.1f %10.4f, estimated %.4f %10.4f, estimated %.4f\n",
                tile.rows, tile.columns, shorter - kShort * each, tile.ends, each, tile.each, two,
                tile.pair);
  }
  check(cudaDeviceSynchronize(), "the end");
}
