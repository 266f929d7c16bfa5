// Elementwise operators, the kernel's side: out[i] = f(in[i]...) for one
// Strided problem. Bound by memory at every size worth tuning, so the design
// is about bytes: wide accesses, and enough of them in flight.
#pragma once

#include <climits>
#include <utility>

#include "dtype.cuh"
#include "strided.h"

namespace cuda_ops {

// --- the launch configuration: a value, chosen without a GPU ------------------

constexpr int kElementwiseThreads = 256;

// Accesses that one thread issues per input before it uses any: 64 bytes of
// loads in flight, at most 4 loads. At 16 bytes each a full H200 SM (2048
// threads) has 128 KiB in flight; hiding 700 ns at 4.8 TB/s takes 25 KiB.
constexpr int unroll_for(int bytes, int inputs) {
  const int unroll = 64 / (bytes * inputs);
  return unroll > 4 ? 4 : unroll;
}

struct ElementwiseConfig {
  enum Path { kVector, kScalar, kStrided } path = kVector;
  int64_t tile = 0;  // elements per block and pass
  int64_t blocks = 0;
};

// 16-byte accesses if every pointer allows them; a slice that starts inside a
// tensor gets scalar ones. Flat kernels take one tile per block, and 2^31
// blocks hold 2^41 elements; strided blocks step over what exceeds 16 blocks
// for each of 256 SMs.
template <int Inputs>
ElementwiseConfig elementwise_config(const Strided<Inputs>& problem, int element_bytes) {
  using Config = ElementwiseConfig;
  uintptr_t address_bits = 0;
  for (const Operand& operand : problem.operands) {
    address_bits |= reinterpret_cast<uintptr_t>(operand.data);
  }
  Config config;
  config.path = !problem.is_flat()       ? Config::kStrided
                : address_bits % 16 == 0 ? Config::kVector
                                         : Config::kScalar;
  const int bytes = config.path == Config::kVector ? 16 : element_bytes;
  config.tile = int64_t(kElementwiseThreads) * (bytes / element_bytes) * unroll_for(bytes, Inputs);
  config.blocks = (problem.numel + config.tile - 1) / config.tile;
  if (config.path == Config::kStrided && config.blocks > 16 * 256) config.blocks = 16 * 256;
  return config;
}

// --- flat: the index is the offset --------------------------------------------

template <int Inputs>
struct Pointers {
  void* out;
  const void* in[Inputs];

  explicit Pointers(const Strided<Inputs>& problem) : out(problem.operands[0].data) {
    for (int k = 0; k < Inputs; ++k) in[k] = problem.operands[k + 1].data;
  }
};

template <class T, int kBytes>
struct alignas(kBytes) Pack {
  static constexpr int kSize = kBytes / int(sizeof(T));
  T values[kSize];
};

template <class T, class F, int Inputs, size_t... I>
__device__ T apply(const F& f, const T (&values)[Inputs], std::index_sequence<I...>) {
  return from_compute<T>(f(to_compute(values[I])...));
}

template <int kBytes, class T, int Inputs, class F>
__global__ void __launch_bounds__(kElementwiseThreads)
    flat_kernel(Pointers<Inputs> pointers, int64_t numel, F f) {
  using P = Pack<T, kBytes>;
  constexpr auto kInputs = std::make_index_sequence<Inputs>{};
  constexpr int kUnroll = unroll_for(kBytes, Inputs);
  const int64_t packs = numel / P::kSize;
  const int64_t first = int64_t(blockIdx.x) * (kElementwiseThreads * kUnroll) + threadIdx.x;

  P in[Inputs][kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t at = first + u * kElementwiseThreads;
#pragma unroll
    for (int k = 0; k < Inputs; ++k) {
      if (at < packs) in[k][u] = static_cast<const P*>(pointers.in[k])[at];
    }
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t at = first + u * kElementwiseThreads;
    if (at >= packs) break;
    P out;
#pragma unroll
    for (int v = 0; v < P::kSize; ++v) {
      T values[Inputs];
#pragma unroll
      for (int k = 0; k < Inputs; ++k) values[k] = in[k][u].values[v];
      out.values[v] = apply(f, values, kInputs);
    }
    static_cast<P*>(pointers.out)[at] = out;
  }

  // What is left of the last pack: fewer than kSize elements, one per thread.
  const int64_t tail = packs * P::kSize + threadIdx.x;
  if (P::kSize > 1 && blockIdx.x == gridDim.x - 1 && tail < numel) {
    T values[Inputs];
#pragma unroll
    for (int k = 0; k < Inputs; ++k) values[k] = static_cast<const T*>(pointers.in[k])[tail];
    static_cast<T*>(pointers.out)[tail] = apply(f, values, kInputs);
  }
}

// --- strided: the index is taken apart, dim by dim ----------------------------

// n / divisor for n < 2^31 without a division: with m = 2^32 (2^s - d) / d + 1
// and 2^s >= d it is (umulhi(n, m) + n) >> s (Granlund and Montgomery, 1994).
struct Divider {
  uint32_t divisor = 1, multiplier = 1, shift = 0;

  Divider() = default;
  explicit Divider(uint32_t d) : divisor(d) {
    while ((uint64_t(1) << shift) < d) ++shift;
    multiplier = uint32_t((uint64_t(1) << 32) * ((uint64_t(1) << shift) - d) / d + 1);
  }
  __device__ uint32_t operator()(uint32_t n) const {
    return (__umulhi(n, multiplier) + n) >> shift;
  }
};

template <int Inputs>
struct Walk {
  Pointers<Inputs> pointers;
  uint32_t numel;
  int dims;
  Divider sizes[kMaxDims];
  uint32_t strides[kMaxDims][Inputs + 1];  // of the output, then of the inputs

  explicit Walk(const Strided<Inputs>& problem)
      : pointers(problem), numel(uint32_t(problem.numel)), dims(problem.dims) {
    for (int d = 0; d < dims; ++d) {
      sizes[d] = Divider(uint32_t(problem.sizes[d]));
      for (int k = 0; k <= Inputs; ++k) strides[d][k] = uint32_t(problem.operands[k].strides[d]);
    }
  }
};

template <class T, int Inputs, class F>
__global__ void __launch_bounds__(kElementwiseThreads)
    strided_kernel(const __grid_constant__ Walk<Inputs> walk, F f) {
  constexpr auto kInputs = std::make_index_sequence<Inputs>{};
  constexpr int kUnroll = unroll_for(sizeof(T), Inputs);
  constexpr int kTile = kElementwiseThreads * kUnroll;
  for (uint32_t tile = blockIdx.x * kTile; tile < walk.numel; tile += gridDim.x * kTile) {
    uint32_t rest[kUnroll];
    uint32_t offsets[kUnroll][Inputs + 1] = {};
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      // Past the end the last element is loaded once more, and not stored.
      rest[u] = min(tile + u * kElementwiseThreads + threadIdx.x, walk.numel - 1);
    }
#pragma unroll 1
    for (int d = 0; d < walk.dims; ++d) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const uint32_t above = walk.sizes[d](rest[u]);
        const uint32_t i = rest[u] - above * walk.sizes[d].divisor;
        rest[u] = above;
#pragma unroll
        for (int k = 0; k <= Inputs; ++k) offsets[u][k] += i * walk.strides[d][k];
      }
    }
    T values[kUnroll][Inputs];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int k = 0; k < Inputs; ++k) {
        values[u][k] = static_cast<const T*>(walk.pointers.in[k])[offsets[u][k + 1]];
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (tile + u * kElementwiseThreads + threadIdx.x >= walk.numel) break;
      static_cast<T*>(walk.pointers.out)[offsets[u][0]] = apply(f, values[u], kInputs);
    }
  }
}

// --- launchers ----------------------------------------------------------------

// The kernels of one dtype, by address: everything from here on is compiled
// once per number of inputs, not once per dtype and function.
struct ElementwiseKernels {
  const void* by_path[3] = {};  // indexed by ElementwiseConfig::Path
  int element_bytes = 0;
};

template <int Inputs>
cudaError_t launch_elementwise(Strided<Inputs> problem, const ElementwiseKernels& kernels, void* f,
                               cudaStream_t stream) {
  const ElementwiseConfig config = elementwise_config(problem, kernels.element_bytes);
  if (config.path == ElementwiseConfig::kStrided && !problem.fits(INT32_MAX)) {
    // 64-bit division would cost 100 instructions per dim and element. Two
    // halves with 32-bit indices cost one more launch.
    Strided<Inputs> upper = problem.split();
    const cudaError_t error = launch_elementwise(problem, kernels, f, stream);
    return error != cudaSuccess ? error : launch_elementwise(upper, kernels, f, stream);
  }
  const void* kernel = kernels.by_path[config.path];
  const dim3 blocks(static_cast<unsigned>(config.blocks)), threads(kElementwiseThreads);
  if (config.path == ElementwiseConfig::kStrided) {
    Walk<Inputs> walk(problem);
    void* arguments[] = {&walk, f};
    return cudaLaunchKernel(kernel, blocks, threads, arguments, 0, stream);
  }
  Pointers<Inputs> pointers(problem);
  void* arguments[] = {&pointers, &problem.numel, f};
  return cudaLaunchKernel(kernel, blocks, threads, arguments, 0, stream);
}

// out[i] = f(inputs[i]...) on the device. `f` takes and returns compute types.
template <int Inputs, class F>
cudaError_t map_cuda(const Strided<Inputs>& problem, cudaStream_t stream, F f) {
  if (problem.numel == 0) return cudaSuccess;
  ElementwiseKernels kernels;
  const cudaError_t error = visit_floating(problem.dtype, [&](auto tag) {
    using T = decltype(tag);
    auto* vector = flat_kernel<16, T, Inputs, F>;
    auto* scalar = flat_kernel<sizeof(T), T, Inputs, F>;
    auto* strided = strided_kernel<T, Inputs, F>;
    kernels = {{reinterpret_cast<const void*>(vector), reinterpret_cast<const void*>(scalar),
                reinterpret_cast<const void*>(strided)},
               sizeof(T)};
    return cudaSuccess;
  });
  return error != cudaSuccess ? error : launch_elementwise(problem, kernels, &f, stream);
}

}  // namespace cuda_ops
