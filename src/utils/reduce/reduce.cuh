// Sums over rows on the device: the pieces, and the kernels for rows that are worth a warp or more.
// The order of additions follows from sizes, alignment and device alone, never from which block is
// first, so a sum has the same bits in every run.
#pragma once

#include "dtype.cuh"
#include "ptx/early_start.cuh"
#include "reduce/reduce.h"
#include "ptx/warp.cuh"

namespace cuda_ops {

// The 16 bytes of a load stay as they came until they are added: a register for
// each 16-bit element would be twice as many.
template <class T>
constexpr int kVector = 16 / int(sizeof(T));

template <class T>
__device__ compute_t<T> total_of(uint4 vector) {
  if constexpr (sizeof(T) == 8) {
    return __hiloint2double(vector.y, vector.x) + __hiloint2double(vector.w, vector.z);
  } else if constexpr (sizeof(T) == 4) {
    return (__uint_as_float(vector.x) + __uint_as_float(vector.y)) +
           (__uint_as_float(vector.z) + __uint_as_float(vector.w));
  } else {
    const auto pair = [](uint32_t word) {
      return to_compute(T{uint16_t(word)}) + to_compute(T{uint16_t(word >> 16)});
    };
    return (pair(vector.x) + pair(vector.y)) + (pair(vector.z) + pair(vector.w));
  }
}

// Sums over a block of kSumThreads; all threads get the sum.
template <class C>
__device__ C block_total(C value) {
  __shared__ C shared[kSumThreads / 32];
  value = lanes_total(value, 32);
  __syncthreads();  // the last call's sums have been read
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  return lanes_total(threadIdx.x % 32 < kSumThreads / 32 ? shared[threadIdx.x % 32] : C(0), 32);
}

// 16-byte loads of a thread in flight: four blocks then fill an SM of an H200 with requests, and
// the few blocks at the end of a grid still do well.
constexpr int kRunLoads = 8;

// Returns the sum of vectors i, i + step, ...: kLoads of them, or those below `count`. Past the end
// the last one is loaded once more: a branch around each load would keep the next one waiting.
template <class T, int kLoads, bool kAll>
__device__ compute_t<T> vectors_total(const uint4* vectors, int64_t i, int64_t step,
                                      int64_t count) {
  uint4 loaded[kLoads];
#pragma unroll
  for (int u = 0; u < kLoads; ++u) {
    const int64_t at = i + u * step;
    loaded[u] = vectors[kAll || at < count ? at : count - 1];
  }
  compute_t<T> sums[2] = {};
#pragma unroll
  for (int u = 0; u < kLoads; ++u) {
    const compute_t<T> sum = total_of<T>(loaded[u]);
    sums[u % 2] += kAll || i + u * step < count ? sum : compute_t<T>(0);
  }
  return sums[0] + sums[1];
}

// Adds up the part of n neighbors of thread `at` of `threads`: single elements before the first
// and after the last aligned address, and vectors between.
template <class T>
__device__ compute_t<T> run_total(const T* data, int64_t n, int at, int threads) {
  const int64_t gap = (16 - reinterpret_cast<uintptr_t>(data) % 16) % 16 / sizeof(T);
  const int64_t head = gap < n ? gap : n;
  const auto* vectors = reinterpret_cast<const uint4*>(data + head);
  const int64_t count = (n - head) / kVector<T>;
  compute_t<T> sum = at < head ? to_compute(data[at]) : compute_t<T>(0);
  int64_t first = 0;  // the same for all threads, so that they stay together
  for (; first + kRunLoads * threads <= count; first += kRunLoads * threads) {
    sum += vectors_total<T, kRunLoads, true>(vectors, first + at, threads, count);
  }
  const int64_t left = count - first;
  if (left > kRunLoads / 2 * threads) {
    sum += vectors_total<T, kRunLoads, false>(vectors, first + at, threads, count);
  } else if (left > threads) {
    sum += vectors_total<T, kRunLoads / 2, false>(vectors, first + at, threads, count);
  } else if (at < left) {
    sum += total_of<T>(vectors[first + at]);
  }
  const int64_t tail = head + count * kVector<T> + at;
  return tail < n ? sum + to_compute(data[tail]) : sum;
}

// --- kernels ------------------------------------------------------------------

// Stores a result, or a partial one in the type that sums.
template <class T>
__device__ void store_sum(void* out, compute_t<T>* partials, int64_t at, compute_t<T> sum) {
  if (partials != nullptr) {
    partials[at] = sum;
  } else {
    static_cast<T*>(out)[at] = from_compute<T>(sum);
  }
}

// The parameters that every thread needs, side by side: each line of them is a cache miss for a
// kernel that has just started.
struct Runs {
  const void* data;
  void* out;
  void* partials;
  int64_t n, chunk, step;  // elements of a row, of a split, and to the next row
  int64_t rows;

  Runs(const RowSums& p, const RowSumsConfig& config, void* partial_sums)
      : data(p.rows.data),
        out(p.out),
        partials(partial_sums),
        n(p.n),
        chunk(config.chunk),
        step(p.rows.strides[0]),
        rows(p.rows.numel) {}
};

// kLanes threads a row, a warp or the block; kLine: the rows are equally far apart. Known at
// compile time, since the first load is near without divisions.
template <class T, int kLanes, bool kLine>
__global__ void __launch_bounds__(kSumThreads, 4)
    runs_kernel(const Runs runs, const __grid_constant__ RowSums p) {
  let_next_start();
  const int lane = int(threadIdx.x % kLanes);
  const int64_t row = int64_t(blockIdx.x) * (kSumThreads / kLanes) + threadIdx.x / kLanes;
  compute_t<T> sum = 0;
  if (row < runs.rows) {
    const int64_t first = blockIdx.y * runs.chunk, left = runs.n - first;
    const int64_t offset = kLine ? row * runs.step : p.rows.offset_at(row);
    const T* data = static_cast<const T*>(runs.data) + offset + first;
    sum = run_total(data, left < runs.chunk ? left : runs.chunk, lane, kLanes);
  }
  sum = kLanes > 32 ? block_total(sum) : lanes_total(sum, 32);
  if (lane == 0 && row < runs.rows) {
    auto* partials = static_cast<compute_t<T>*>(runs.partials);
    store_sum<T>(runs.out, partials, row * gridDim.y + blockIdx.y, sum);
  }
}

template <class T>
__global__ void __launch_bounds__(kSumThreads)
    strided_kernel(const __grid_constant__ RowSums p, const RowSumsConfig config,
                   compute_t<T>* partials) {
  let_next_start();
  using C = compute_t<T>;
  __shared__ C shared[kSumThreads];
  const int lanes = config.lanes, rows = kSumThreads / lanes;
  const int thread = int(threadIdx.x);
  const int lane = config.along_rows ? thread / rows : thread % lanes;
  const int64_t split = blockIdx.y;
  const int64_t first_row = int64_t(blockIdx.x) * rows;
  const int64_t row = first_row + (config.along_rows ? thread % rows : thread / lanes);
  C sum = 0;
  if (row < p.rows.numel) {
    const T* data = static_cast<const T*>(p.rows.data) + p.rows.offset_at(row);
    const int64_t begin = split * config.chunk;
    const int64_t end = begin + config.chunk < p.n ? begin + config.chunk : p.n;
#pragma unroll 8
    for (int64_t k = begin + lane; k < end; k += lanes) sum += to_compute(data[k * p.stride]);
  }
  shared[thread] = sum;
  __syncthreads();
  if (thread >= rows || first_row + thread >= p.rows.numel) return;
  sum = 0;
  for (int k = 0; k < lanes; ++k) {
    sum += shared[config.along_rows ? k * rows + thread : thread * lanes + k];
  }
  store_sum<T>(p.out, partials, (first_row + thread) * config.splits + split, sum);
}

// out[i] = the sum of `count` partial sums, one block each.
template <class T>
__global__ void __launch_bounds__(kSumThreads)
    finish_kernel(T* out, const compute_t<T>* partials, int64_t count) {
  wait_for_previous();
  partials += blockIdx.x * count;
  compute_t<T> sum = 0;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < count; i += kSumThreads) sum += partials[i];
  sum = block_total(sum);
  if (threadIdx.x == 0) out[blockIdx.x] = from_compute<T>(sum);
}

// --- launchers ----------------------------------------------------------------

// Computes the sums, or `splits` partial ones per row if `partials` is not null.
template <class T>
cudaError_t launch_partial_sums(const RowSums& p, const RowSumsConfig& config,
                                compute_t<T>* partials, cudaStream_t stream) {
  if (config.blocks == 0) return cudaSuccess;
  const dim3 blocks(unsigned(config.blocks / config.splits), unsigned(config.splits));
  if (config.path == RowSumsConfig::kStrided) {
    strided_kernel<T><<<blocks, kSumThreads, 0, stream>>>(p, config, partials);
    return cudaGetLastError();
  }
  auto* kernel =
      p.rows.dims <= 1
          ? (config.lanes == 32 ? runs_kernel<T, 32, true> : runs_kernel<T, kSumThreads, true>)
      : config.lanes == 32 ? runs_kernel<T, 32, false>
                           : runs_kernel<T, kSumThreads, false>;
  kernel<<<blocks, kSumThreads, 0, stream>>>(Runs(p, config, partials), p);
  return cudaGetLastError();
}

template <class T>
cudaError_t launch_finish(T* out, const compute_t<T>* partials, int64_t rows, int64_t count,
                          cudaStream_t stream) {
  return launch_early(finish_kernel<T>, unsigned(rows), kSumThreads, 0, stream, out, partials,
                      count);
}

template <class T>
cudaError_t launch_row_sums(const RowSums& p, cudaStream_t stream) {
  const RowSumsConfig config = row_sums_config(p, current_device());
  if (config.splits == 1) return launch_partial_sums<T>(p, config, nullptr, stream);
  auto* partials = static_cast<compute_t<T>*>(p.partials);
  const cudaError_t error = launch_partial_sums<T>(p, config, partials, stream);
  if (error != cudaSuccess) return error;
  return launch_finish(static_cast<T*>(p.out), partials, p.rows.numel, config.splits, stream);
}

}  // namespace cuda_ops
