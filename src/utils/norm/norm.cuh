// Norms over rows on the device. Each row is read once into registers, where that fits, and the
// sums over it are taken from there; so the time is that of reading x and writing the result.
#pragma once

#include "norm/norm.h"
#include "ptx/capability.h"
#include "ptx/cp_async.cuh"
#include "rows/rows.cuh"

namespace cuda_ops {

// Pack `at` of the weights, whose elements may be wider than those of x.
template <class W, int kPack, class C>
__device__ void load_weights(const void* weights, int64_t at, C (&values)[kPack]) {
  if constexpr (kPack == 1) {
    values[0] = to_compute(static_cast<const W*>(weights)[at]);
  } else {
    using V = std::conditional_t<kPack * sizeof(W) == 8, uint2, uint4>;
    constexpr int kLoad = int(sizeof(V) / sizeof(W)), kLoads = kPack / kLoad;
    const auto* vectors = static_cast<const V*>(weights) + at * kLoads;
#pragma unroll
    for (int u = 0; u < kLoads; ++u) unpack_vector<W>(vectors[u], values + u * kLoad);
  }
}

__device__ inline float inverse_root(float value) { return 1 / sqrtf(value); }
__device__ inline double inverse_root(double value) { return 1 / sqrt(value); }

// --- the norm -------------------------------------------------------------------

__device__ inline float not_below_zero(float value) { return value < 0 ? 0 : value; }
__device__ inline double not_below_zero(double value) { return value < 0 ? 0 : value; }

// The mean of a row in two parts. The first is known before any sum, so that one look at the row
// gives both mean and variance: it is the mean of the first pack, or where that is far from all of
// the row's, what the first look has found. The second part is the mean of x - first, which is
// small and so nearly exact. In a row of equal numbers the first part is each of them: what was
// left would be multiplied by 1 / sqrt(eps).
template <class C>
struct Mean {
  C first = 0, second = 0;

  template <int kPack>
  __device__ void guess(const C (&values)[kPack]) {
    C sum = 0;
#pragma unroll
    for (const C value : values) sum += value - values[0];
    first = values[0] + sum / kPack;
  }

  __device__ C without(C value) const { return (value - first) - second; }

  // Takes the mean of x - first and that of its square; returns the variance.
  __device__ C refine(C mean, C of_squares) {
    second = mean;
    return not_below_zero(of_squares - second * second);
  }

  // Whether the variance is a difference of numbers that are much larger.
  __device__ bool is_far(C variance) const { return !(second * second <= variance); }
};

// Calls look(), which returns whether the first part of the mean was far, and once more where it
// was. Rows that share a warp look together; those that were near find the same again.
template <class C, class Look>
__device__ void look_at_row(Mean<C>& mean, int lanes, Look look) {
  const bool is_far = look();
  if (lanes < 32 ? !__any_sync(~0u, is_far) : !is_far) return;
  if (is_far) mean.first += mean.second;
  look();
}

template <class T, class W, int kPack, int kPacks, NormKind kKind>
__global__ void __launch_bounds__(1024)
    norm_kernel(const __grid_constant__ Norm p, const int lanes) {
  using C = compute_t<T>;
  const int rows = int(blockDim.x) / lanes, lane = int(threadIdx.x) % lanes;
  const int64_t wanted = int64_t(blockIdx.x) * rows + int(threadIdx.x) / lanes;
  // Past the last row, lanes go along with those of their warp that have one, and write nothing.
  const bool is_row = wanted < p.rows;
  const int64_t row = is_row ? wanted : p.rows - 1;
  const int64_t count = is_row ? p.n / kPack : 0;
  RowPart<T, kPack, kPacks> x(at_row<T>(p.x, row * p.x_step), count, lane, lanes);
  x.load();
  if constexpr (kKind == NormKind::kAddRms) {
    T* const residual = at_row<T>(p.residual, row * p.residual_step);
    RowPart<T, kPack, kPacks> before(residual, count, lane, lanes);
    before.load();
    // The sum as it is stored, rounded to T, is what is normalized.
    x.each([&](int64_t at, int u, const auto& values) {
      C sums[kPack];
      before.get(at, u, sums);
#pragma unroll
      for (int v = 0; v < kPack; ++v) sums[v] += values[v];
      const Raw<T, kPack> sum = packed<T, kPack>(sums);
      reinterpret_cast<Raw<T, kPack>*>(residual)[at] = sum;
      x.kept[u] = sum;
    });
    x.data = before.data;  // for rows that are read again, each thread its own packs
  }
  constexpr bool kLayer = kKind == NormKind::kLayer;
  // A single pack's weights are on their way while the row is added up: with few rows, nothing else
  // would hide how long they take.
  constexpr bool kEarly = kPacks == 1;
  C weights[kPack], biases[kPack];
  if (kEarly && lane < count) {
    load_weights<W, kPack>(p.weight, lane, weights);
    if constexpr (kLayer) load_weights<W, kPack>(p.bias, lane, biases);
  }
  Mean<C> mean;
  C variance = 0;
  const auto look = [&] {
    C totals[kLayer ? 2 : 1] = {};  // of squares, and of what is squared
    x.each([&](int64_t, int, const auto& values) {
#pragma unroll
      for (const C value : values) {
        const C left = value - mean.first;
        totals[0] += left * left;
        if constexpr (kLayer) totals[1] += left;
      }
    });
    row_totals(totals, lanes);
    variance = totals[0] / C(p.n);
    if constexpr (kLayer) variance = mean.refine(totals[1] / C(p.n), variance);
    return kLayer && mean.is_far(variance);
  };
  if constexpr (kLayer) {
    C values[kPack];
    unpack<T, kPack>(x.data[0], values);
    mean.guess(values);
    look_at_row(mean, lanes, look);
  } else {
    look();
  }
  const C scale = inverse_root(variance + C(p.eps));
  T* const out = at_row<T>(p.out, row * p.out_step);
  x.each([&](int64_t at, int, const auto& values) {
    C results[kPack];
    if constexpr (!kEarly) {
      load_weights<W, kPack>(p.weight, at, weights);
      if constexpr (kLayer) load_weights<W, kPack>(p.bias, at, biases);
    }
#pragma unroll
    for (int v = 0; v < kPack; ++v) {
      results[v] = mean.without(values[v]) * scale * weights[v];
      if constexpr (kLayer) results[v] += biases[v];
    }
    store_pack<T, kPack>(out, at, results);
  });
}

// A product that the compiler may not join with the addition after it.
__device__ inline float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double rounded_product(double a, double b) { return __dmul_rn(a, b); }

// --- the gradient ---------------------------------------------------------------

// A row of x and of grad_out, as a thread has them: in registers, or read again from memory.
template <class T, int kPack, int kPacks>
struct KeptRows {
  using C = compute_t<T>;
  RowPart<T, kPack, kPacks> x, grad;
  C first[kPack];  // the first pack of x

  __device__ KeptRows(const void* x_row, const void* grad_row, int64_t count, int lane, int lanes)
      : x(x_row, count, lane, lanes), grad(grad_row, count, lane, lanes) {
    x.load();
    grad.load();
    unpack<T, kPack>(x.data[0], first);
  }

  // Calls body(at, u, values, grads) for each pack of this thread.
  template <class Body>
  __device__ void each(Body&& body) const {
    grad.each([&](int64_t at, int u, const auto& grads) {
      C values[kPack];
      x.get(at, u, values);
      body(at, u, values, grads);
    });
  }
};

// The same in shared memory, where it has been copied to while other rows were worked on. A thread
// copies what it uses itself, so none waits for another.
template <class T, int kPack, int kPacks, bool kFirst>
struct QueuedRows {
  using C = compute_t<T>;
  using R = Raw<T, kPack>;
  static constexpr int kSlots = 2 * kPacks + kFirst;  // of a thread and a stage

  R* slots;
  int64_t count;
  int lane, lanes;
  C first[kPack];

  __device__ R* slot(int k) const { return slots + k * int(blockDim.x); }

  __device__ QueuedRows(void* shared, int stage, int64_t count, int lane, int lanes)
      : slots(static_cast<R*>(shared) + stage * kSlots * int(blockDim.x) + int(threadIdx.x)),
        count(count),
        lane(lane),
        lanes(lanes) {}

  __device__ void start(const void* x_row, const void* grad_row) const {
    const auto copy = [&](int k, const void* row, int64_t at) {
      cp_async_whole<sizeof(R)>(uint32_t(__cvta_generic_to_shared(slot(k))),
                                static_cast<const R*>(row) + at);
    };
#pragma unroll
    for (int u = 0; u < kPacks; ++u) {
      const int64_t at = lane + u * lanes;
      if (at >= count) break;
      copy(u, x_row, at);
      copy(kPacks + u, grad_row, at);
    }
    if (kFirst && count > 0) copy(2 * kPacks, x_row, 0);
  }

  // Once they are there.
  __device__ void begin() {
    if constexpr (kFirst) unpack<T, kPack>(*slot(2 * kPacks), first);
  }

  template <class Body>
  __device__ void each(Body&& body) const {
#pragma unroll
    for (int u = 0; u < kPacks; ++u) {
      const int64_t at = lane + u * lanes;
      if (at >= count) break;
      C values[kPack], grads[kPack];
      unpack<T, kPack>(*slot(u), values);
      unpack<T, kPack>(*slot(kPacks + u), grads);
      body(at, u, values, grads);
    }
  }
};

// Waits for the oldest of `stages` groups of copies.
__device__ inline void wait_for_stage(int stages) {
  if (stages == 3) return cp_async_wait<2>();
  if (stages == 2) return cp_async_wait<1>();
  cp_async_wait<0>();
}

// With y = (x - mean) scale and g = grad_out weight:
// grad_x = scale (g - mean(g) - y mean(g y)), without mean(g) for kRms;
// grad_weight = sum of grad_out y over the rows, grad_bias = sum of grad_out.
template <class T, class W, int kPack, int kPacks, NormKind kKind>
__global__ void __launch_bounds__(512)
    norm_gradient_kernel(const __grid_constant__ NormGradient p, const NormGradientConfig config) {
  using C = compute_t<T>;
  constexpr bool kLayer = kKind == NormKind::kLayer;
  constexpr bool kQueued = kPack > 1 && kPacks > 0;
  constexpr int kSums = kLayer ? 2 : 1;
  extern __shared__ __align__(16) uint8_t shared_bytes[];
  const Norm& norm = p.norm;
  const int lanes = config.lanes, rows = int(blockDim.x) / lanes;
  const int lane = int(threadIdx.x) % lanes, group = int(threadIdx.x) / lanes;
  const int64_t n = norm.n, packs = n / kPack;
  C* partials[kSums];
#pragma unroll
  for (int k = 0; k < kSums; ++k) {
    partials[k] = static_cast<C*>(p.partials) + (int64_t(k) * gridDim.x + blockIdx.x) * n;
  }
  // Sums over this thread's rows, of the columns that it has in each of them. Where a row does not
  // fit, these do not fit into registers either: the block has one row at a time, and each thread
  // adds to its own columns of the partial sums in memory.
  C sums[kSums][kPacks > 0 ? kPacks : 1][kPack] = {};
  if constexpr (kPacks == 0) {
    for (int64_t at = lane; at < packs; at += lanes) {
#pragma unroll
      for (int k = 0; k < kSums; ++k) {
#pragma unroll
        for (int v = 0; v < kPack; ++v) partials[k][at * kPack + v] = 0;
      }
    }
  }
  // The sums of one row: mean and scale, then its gradient.
  const auto work = [&](const auto& pair, T* grad_x) {
    Mean<C> mean;
    // Sums of d^2, g d, g and d, where d is x without the first part of its mean.
    C totals[kLayer ? 4 : 2], variance = 0;
    const auto look = [&] {
#pragma unroll
      for (C& total : totals) total = 0;
      pair.each([&](int64_t at, int, const auto& values, const auto& grads) {
        C weights[kPack];
        load_weights<W, kPack>(norm.weight, at, weights);
#pragma unroll
        for (int v = 0; v < kPack; ++v) {
          const C left = values[v] - mean.first, g = grads[v] * weights[v];
          totals[0] += left * left;
          totals[1] += g * left;
          if constexpr (kLayer) {
            totals[2] += g;
            totals[3] += left;
          }
        }
      });
      row_totals(totals, lanes);
      variance = totals[0] / C(n);
      if constexpr (kLayer) variance = mean.refine(totals[3] / C(n), variance);
      return kLayer && mean.is_far(variance);
    };
    C shift = 0;  // mean(g)
    if constexpr (kLayer) {
      mean.guess(pair.first);
      look_at_row(mean, lanes, look);
      totals[1] -= mean.second * totals[2];
      shift = totals[2] / C(n);
    } else {
      look();
    }
    const C scale = inverse_root(variance + C(norm.eps));
    const C along = totals[1] / C(n) * scale * scale;  // mean(g y) scale
    pair.each([&](int64_t at, int u, const auto& values, const auto& grads) {
      C weights[kPack], results[kPack];
      load_weights<W, kPack>(norm.weight, at, weights);
#pragma unroll
      for (int v = 0; v < kPack; ++v) {
        const C centered = mean.without(values[v]);
        // Rounded, as the sum was: where all g are equal, nothing is left over.
        const C g = rounded_product(grads[v], weights[v]);
        results[v] = scale * (g - shift - centered * along);
        const C of_weight = grads[v] * centered * scale;
        if constexpr (kPacks > 0) {
          sums[0][u][v] += of_weight;
          if constexpr (kLayer) sums[1][u][v] += grads[v];
        } else {
          partials[0][at * kPack + v] += of_weight;
          if constexpr (kLayer) partials[1][at * kPack + v] += grads[v];
        }
      }
      store_pack<T, kPack>(grad_x, at, results);
    });
  };

  // Past the last row, lanes go along with those of their block that have one, without packs.
  const int64_t from = int64_t(blockIdx.x) * rows, step = int64_t(gridDim.x) * rows;
  const auto row_of = [&](int64_t first) {
    return first + group < norm.rows ? first + group : norm.rows - 1;
  };
  const auto count_of = [&](int64_t first) { return first + group < norm.rows ? packs : 0; };
  const auto x_of = [&](int64_t first) { return at_row<T>(norm.x, row_of(first) * norm.x_step); };
  const auto grad_of = [&](int64_t first) { return at_row<T>(p.grad_out, row_of(first) * n); };
  if constexpr (kQueued) {
#if __CUDA_ARCH__ >= 800
    using Rows = QueuedRows<T, kPack, kPacks, kLayer>;
    const auto start = [&](int64_t first, int stage) {
      if (first < norm.rows) {
        const Rows pair(shared_bytes, stage, count_of(first), lane, lanes);
        pair.start(x_of(first), grad_of(first));
      }
      cp_async_commit();
    };
    for (int stage = 0; stage < config.stages; ++stage) start(from + stage * step, stage);
    int stage = 0;
    for (int64_t first = from; first < norm.rows; first += step) {
      wait_for_stage(config.stages);
      Rows pair(shared_bytes, stage, count_of(first), lane, lanes);
      pair.begin();
      work(pair, at_row<T>(p.grad_x, row_of(first) * n));
      start(first + config.stages * step, stage);
      if (++stage == config.stages) stage = 0;
    }
    cp_async_wait<0>();
#endif
  } else {
    for (int64_t first = from; first < norm.rows; first += step) {
      const KeptRows<T, kPack, kPacks> pair(x_of(first), grad_of(first), count_of(first), lane,
                                            lanes);
      work(pair, at_row<T>(p.grad_x, row_of(first) * n));
    }
  }
  if constexpr (kPacks > 0) {
    // The rows of a block are added up in order.
    C* const shared = reinterpret_cast<C*>(shared_bytes);
#pragma unroll
    for (int k = 0; k < kSums; ++k) {
      __syncthreads();
#pragma unroll
      for (int u = 0; u < kPacks; ++u) {
        const int64_t at = lane + u * lanes;
#pragma unroll
        for (int v = 0; v < kPack; ++v) {
          if (at >= packs) continue;
          if (rows == 1) {
            partials[k][at * kPack + v] = sums[k][u][v];
          } else {
            shared[group * n + at * kPack + v] = sums[k][u][v];
          }
        }
      }
      __syncthreads();
      for (int64_t i = threadIdx.x; rows > 1 && i < n; i += blockDim.x) {
        C sum = 0;
        for (int g = 0; g < rows; ++g) sum += shared[g * n + i];
        partials[k][i] = sum;
      }
    }
  }
}

constexpr int kNormColumns = 32, kNormParts = 8;

// Adds up the partial sums of all blocks, in the same order every time.
template <class W, class C>
__global__ void __launch_bounds__(kNormColumns* kNormParts)
    norm_finish_kernel(W* weight, W* bias, const C* partials, int64_t n, int64_t count) {
  __shared__ C shared[kNormParts][kNormColumns];
  const int column = int(threadIdx.x) % kNormColumns, part = int(threadIdx.x) / kNormColumns;
  const int64_t i = int64_t(blockIdx.x) * kNormColumns + column;
  partials += blockIdx.y * count * n;
  C sum = 0;
  if (i < n) {
#pragma unroll 8
    for (int64_t k = part; k < count; k += kNormParts) sum += partials[k * n + i];
  }
  shared[part][column] = sum;
  __syncthreads();
  if (part > 0 || i >= n) return;
  sum = 0;
#pragma unroll
  for (int k = 0; k < kNormParts; ++k) sum += shared[k][column];
  (blockIdx.y == 0 ? weight : bias)[i] = from_compute<W>(sum);
}

// --- launchers ------------------------------------------------------------------

namespace detail {

// Calls body(T{}, W{}, pack) with the types of x and of the weights.
template <class Body>
cudaError_t visit_norm(const Norm& p, int pack, Body&& body) {
  return visit_floating(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    constexpr int kBytes = int(sizeof(T));
    const auto visit_pack = [&](auto weight) {
      if (pack == 1) return body(tag, weight, Constant<1>{});
      if constexpr (kBytes < 8) {
        if (pack == 8 / kBytes) return body(tag, weight, Constant<8 / kBytes>{});
      }
      return body(tag, weight, Constant<16 / kBytes>{});
    };
    if (p.weight_dtype == p.dtype) return visit_pack(tag);
    return visit_pack(compute_t<T>{});
  });
}

}  // namespace detail

template <NormKind kKind>
cudaError_t launch_norm(const Norm& p, cudaStream_t stream) {
  if (p.rows == 0 || p.n == 0) return cudaSuccess;
  const RowConfig config = norm_config(p, current_device());
  return detail::visit_norm(p, config.pack, [&](auto tag, auto weight, auto pack) {
    using T = decltype(tag);
    using W = decltype(weight);
    constexpr int kPack = decltype(pack)::value;
    constexpr int kMost = most_packs(kPack);
    auto* kernel = config.packs == kMost       ? norm_kernel<T, W, kPack, kMost, kKind>
                   : config.packs == kMost / 2 ? norm_kernel<T, W, kPack, kMost / 2, kKind>
                   : config.packs == kMost / 4 ? norm_kernel<T, W, kPack, kMost / 4, kKind>
                                               : norm_kernel<T, W, kPack, 0, kKind>;
    kernel<<<unsigned(config.blocks), config.threads, 0, stream>>>(p, config.lanes);
    return cudaGetLastError();
  });
}

template <NormKind kKind>
cudaError_t launch_norm_gradient(const NormGradient& p, cudaStream_t stream) {
  if (p.norm.n == 0) return cudaSuccess;
  const NormGradientConfig config = norm_gradient_config(p, current_device());
  return detail::visit_norm(p.norm, config.pack, [&](auto tag, auto weight, auto pack) {
    using T = decltype(tag);
    using W = decltype(weight);
    using C = compute_t<T>;
    constexpr int kPack = decltype(pack)::value;
    constexpr int kMost = most_gradient_packs(kPack);
    auto* kernel = config.packs == kMost       ? norm_gradient_kernel<T, W, kPack, kMost, kKind>
                   : config.packs == kMost / 2 ? norm_gradient_kernel<T, W, kPack, kMost / 2, kKind>
                   : config.packs == kMost / 4 ? norm_gradient_kernel<T, W, kPack, kMost / 4, kKind>
                                               : norm_gradient_kernel<T, W, kPack, 0, kKind>;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             int(config.shared_bytes));
    if (error != cudaSuccess) return error;
    kernel<<<unsigned(config.blocks), config.threads, size_t(config.shared_bytes), stream>>>(
        p, config);
    error = cudaGetLastError();
    if (error != cudaSuccess) return error;
    const dim3 blocks(unsigned((p.norm.n + kNormColumns - 1) / kNormColumns),
                      kKind == NormKind::kLayer ? 2 : 1);
    norm_finish_kernel<W, C><<<blocks, kNormColumns * kNormParts, 0, stream>>>(
        static_cast<W*>(p.grad_weight), static_cast<W*>(p.grad_bias),
        static_cast<const C*>(p.partials), p.norm.n, config.blocks);
    return cudaGetLastError();
  });
}

}  // namespace cuda_ops
