// Times variants of the flat elementwise kernel: threads per block, accesses per thread and their
// size, cache hints and the order of tiles, from 1K to 256M elements. Inputs
// rotate through 6 GiB, so the L2 is cold; launches come from one CUDA graph.
// Prints microseconds and GB/s of every variant.
//
//   nvcc -std=c++17 --expt-relaxed-constexpr -gencode=arch=compute_90a,code=sm_90a
//        -I src/utils -o /tmp/sweep benchmarks/tuning/elementwise.cu && /tmp/sweep
#include <algorithm>
#include <cstdio>
#include <vector>

#include "elementwise.cuh"
#include "math.cuh"

using namespace cuda_ops;

namespace {

constexpr int64_t kArena = int64_t(6) << 30;

template <class Math>
struct Silu {
  template <class C>
  __device__ C operator()(C x) const {
    return x * sigmoid<Math>(x);
  }
};

template <class Math>
struct SiluBackward {
  template <class C>
  __device__ C operator()(C g, C x) const {
    const C s = sigmoid<Math>(x);
    return g * s * (1 + x * (1 - s));
  }
};

enum Load { kPlainLoad, kStreamingLoad, kNoL1Load, kPrefetchingLoad };
enum Store { kPlainStore, kStreamingStore, kNoL1Store };
enum Order { kTiles, kGridStride };

template <int kLoad>
__device__ int4 load(const int4* p) {
  int4 v;
  if (kLoad == kPlainLoad) v = *p;
  if (kLoad == kStreamingLoad) v = __ldcs(p);
  if (kLoad == kNoL1Load) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.s32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
  }
  if (kLoad == kPrefetchingLoad) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.s32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
  }
  return v;
}

template <int kStore>
__device__ void store(int4* p, int4 v) {
  if (kStore == kPlainStore) *p = v;
  if (kStore == kStreamingStore) __stcs(p, v);
  if (kStore == kNoL1Store) {
    asm volatile("st.global.L1::no_allocate.v4.s32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x),
                 "r"(v.y), "r"(v.z), "r"(v.w));
  }
}

template <int kThreads, int kUnroll, int kLoad, int kStore, int kOrder, class T, int Inputs,
          class F>
__global__ void __launch_bounds__(kThreads)
    variant_kernel(Pointers<Inputs, 1> pointers, int64_t packs, F f) {
  using P = Pack<T, kPackBytes>;
  P in[kUnroll][Inputs];
  const int64_t step = kOrder == kTiles ? kThreads : int64_t(gridDim.x) * kThreads;
  const int64_t first =
      int64_t(blockIdx.x) * (kOrder == kTiles ? kThreads * kUnroll : kThreads) + threadIdx.x;
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t at = first + u * step;
    if (at >= packs) continue;
    for (int k = 0; k < Inputs; ++k) {
      const int4 v = load<kLoad>(static_cast<const int4*>(pointers.in[k]) + at);
      in[u][k] = reinterpret_cast<const P&>(v);
    }
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t at = first + u * step;
    if (at >= packs) break;
    P out[1];
    apply(f, in[u], out);
    store<kStore>(static_cast<int4*>(pointers.out[0]) + at, reinterpret_cast<int4&>(out[0]));
  }
}

// `launch(problem, stream)` starts a variant.
template <class T, int Inputs, class Launch>
void measure(const char* label, char* arena, int64_t numel, const char* variant, Launch launch) {
  const int64_t bytes = numel * int64_t(sizeof(T)), call = bytes * (Inputs + 1);
  const int64_t sets = std::clamp<int64_t>(kArena / call, 1, 64);
  const int calls = numel >= (1 << 26) ? 6 : numel >= (1 << 23) ? 20 : 64;
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t captured;
  cudaStreamCreate(&stream);
  cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
  for (int i = 0; i < calls; ++i) {
    Strided<Inputs> problem;
    problem.numel = numel;
    for (int k = 0; k <= Inputs; ++k) {
      problem.operands[k].data = arena + (i % sets) * call + k * bytes;
    }
    launch(problem, stream);
  }
  cudaStreamEndCapture(stream, &graph);
  cudaGraphInstantiate(&captured, graph, 0);
  cudaEvent_t start, end;
  cudaEventCreate(&start);
  cudaEventCreate(&end);
  std::vector<float> times;
  for (int round = 0; round < 7; ++round) {
    float milliseconds = 0;
    cudaEventRecord(start, stream);
    cudaGraphLaunch(captured, stream);
    cudaEventRecord(end, stream);
    cudaEventSynchronize(end);
    cudaEventElapsedTime(&milliseconds, start, end);
    times.push_back(milliseconds * 1e3f / float(calls));
  }
  std::sort(times.begin(), times.end());
  std::printf("%-19s %10lld %s %9.2f us %5.0f GB/s\n", label, static_cast<long long>(numel),
              variant, times[3], double(call) / times[3] / 1e3);
  cudaGraphExecDestroy(captured);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

template <int kThreads, int kUnroll, int kLoad, int kStore, int kOrder, class T, int Inputs,
          class F>
void measure(const char* label, char* arena, int64_t numel, F f) {
  char variant[80];
  std::snprintf(variant, sizeof variant, "threads %4d accesses %d load %d store %d order %d",
                kThreads, kUnroll, kLoad, kStore, kOrder);
  const int64_t packs = numel * int64_t(sizeof(T)) / kPackBytes, tile = kThreads * kUnroll;
  measure<T, Inputs>(label, arena, numel, variant, [&](const auto& problem, cudaStream_t stream) {
    variant_kernel<kThreads, kUnroll, kLoad, kStore, kOrder, T>
        <<<unsigned((packs + tile - 1) / tile), kThreads, 0, stream>>>(Pointers<Inputs, 1>(problem),
                                                                       packs, f);
  });
}

// Starts the kernel itself, with accesses of `kBytes` bytes.
template <int kBytes, class T, int Inputs, class F>
void measure_kernel(const char* label, char* arena, int64_t numel, F f) {
  char variant[80];
  std::snprintf(variant, sizeof variant, "flat_kernel, %2d bytes", kBytes);
  const int64_t tile = kElementwiseThreads * (kBytes / int(sizeof(T)));
  measure<T, Inputs>(label, arena, numel, variant, [&](const auto& problem, cudaStream_t stream) {
    flat_kernel<kBytes, T, Inputs, 1>
        <<<unsigned((numel + tile - 1) / tile), kElementwiseThreads, 0, stream>>>(
            Pointers<Inputs, 1>(problem), numel, f);
  });
}

template <class T, int Inputs, class F>
void measure_all(const char* label, char* arena, int64_t n, F f) {
  measure_kernel<4, T, Inputs>(label, arena, n, f);
  measure_kernel<8, T, Inputs>(label, arena, n, f);
  measure_kernel<16, T, Inputs>(label, arena, n, f);
  measure<128, 1, 0, 0, 0, T, Inputs>(label, arena, n, f);
  measure<128, 2, 0, 0, 0, T, Inputs>(label, arena, n, f);
  measure<128, 4, 0, 0, 0, T, Inputs>(label, arena, n, f);
  measure<128, 8, 0, 0, 0, T, Inputs>(label, arena, n, f);
  measure<256, 1, 0, 0, 0, T, Inputs>(label, arena, n, f);
  measure<256, 2, 0, 0, 0, T, Inputs>(label, arena, n, f);
  measure<256, 4, 0, 0, 0, T, Inputs>(label, arena, n, f);
  measure<256, 8, 0, 0, 0, T, Inputs>(label, arena, n, f);
  measure<512, 1, 0, 0, 0, T, Inputs>(label, arena, n, f);
  measure<512, 2, 0, 0, 0, T, Inputs>(label, arena, n, f);
  measure<1024, 1, 0, 0, 0, T, Inputs>(label, arena, n, f);
  measure<256, 4, kStreamingLoad, kStreamingStore, kTiles, T, Inputs>(label, arena, n, f);
  measure<256, 2, kStreamingLoad, kStreamingStore, kTiles, T, Inputs>(label, arena, n, f);
  measure<256, 4, kPlainLoad, kStreamingStore, kTiles, T, Inputs>(label, arena, n, f);
  measure<256, 4, kNoL1Load, kPlainStore, kTiles, T, Inputs>(label, arena, n, f);
  measure<256, 4, kNoL1Load, kNoL1Store, kTiles, T, Inputs>(label, arena, n, f);
  measure<128, 2, kPrefetchingLoad, kStreamingStore, kTiles, T, Inputs>(label, arena, n, f);
  measure<256, 2, kPrefetchingLoad, kStreamingStore, kTiles, T, Inputs>(label, arena, n, f);
  measure<256, 4, kPlainLoad, kPlainStore, kGridStride, T, Inputs>(label, arena, n, f);
}

}  // namespace

int main() {
  char* arena = nullptr;
  cudaMalloc(&arena, kArena);
  cudaMemset(arena, 0x3c, kArena);
  for (const int shift : {10, 15, 18, 20, 24, 25, 26, 28}) {
    const int64_t n = int64_t(1) << shift;
    measure_all<float, 1>("silu f32", arena, n, Silu<Accurate>{});
    measure_all<BFloat16, 1>("silu bf16", arena, n, Silu<Coarse>{});
    measure_all<float, 2>("silu_backward f32", arena, n, SiluBackward<Accurate>{});
    measure_all<BFloat16, 2>("silu_backward bf16", arena, n, SiluBackward<Coarse>{});
  }
  const cudaError_t error = cudaDeviceSynchronize();
  if (error != cudaSuccess) std::printf("failed: %s\n", cudaGetErrorString(error));
  return error != cudaSuccess;
}
