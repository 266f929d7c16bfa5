// Sums over the last dim. Every byte of x is read once and nothing of that size is written, so the
// time is that of reading. reduce.cuh takes long rows; short ones, where its threads would have
// little to do, are here.
#include "reduce/reduce.cuh"

using namespace cuda_ops;

namespace {

constexpr int kTileBytes = 16384;  // 4 loads of 16 bytes per thread
constexpr int kLoads = 4;
constexpr int64_t kMostTileRows = 2048;
constexpr int64_t kManyRows = 32768;  // enough to fill a GPU with a few threads a row

// --- the launch configuration: a value, chosen without a GPU ------------------

struct ShortRowsConfig {
  // kVectors: rows are whole aligned 16-byte vectors, `lanes` threads a row.
  // kTile: any other dense rows, through shared memory. kLong: reduce.cuh.
  enum Path { kVectors, kTile, kLong } path = kLong;
  int lanes = 1;
  int64_t rows = 0;  // of a block
  int64_t blocks = 0;
};

ShortRowsConfig short_rows_config(const RowSums& p) {
  using Config = ShortRowsConfig;
  Config config;
  const int64_t bytes = p.n * size_of(p.rows.dtype);
  const bool runs = p.stride == 1 || p.n == 1;
  if (!runs || bytes == 0) return config;
  const int64_t vectors = bytes / 16;
  if (bytes % 16 == 0 && vectors <= 128 && p.rows.is_aligned(16) &&
      (vectors <= 16 || p.rows.numel >= kManyRows)) {
    config.path = Config::kVectors;
    while (config.lanes < 4 && config.lanes < vectors) config.lanes *= 2;
    while (config.lanes < 32 && 4 * config.lanes < vectors) config.lanes *= 2;
    config.rows = kLoads * (kSumThreads / config.lanes);
  } else if (bytes <= kTileBytes / 16 * size_of(p.rows.dtype) && p.rows.is_line(p.n) &&
             is_aligned(p.rows.data, 16)) {
    config.path = Config::kTile;
    int64_t whole = 1;  // so many rows are a multiple of 16 bytes: every tile starts aligned
    while (whole * bytes % 16 != 0) whole *= 2;
    config.rows = kTileBytes / bytes < kMostTileRows ? kTileBytes / bytes : kMostTileRows;
    config.rows = config.rows / whole * whole;
    while (config.lanes < 32 && 2 * config.lanes * config.rows <= kSumThreads) config.lanes *= 2;
  }
  if (config.rows > 0) config.blocks = (p.rows.numel + config.rows - 1) / config.rows;
  return config;
}

// --- kernels ------------------------------------------------------------------

// Each thread takes kLoads rows, so that as many loads are in flight. A row has few lanes, since
// adding up across lanes takes more instructions than loading does.
template <class T>
__global__ void __launch_bounds__(kSumThreads, 5)
    vectors_kernel(const __grid_constant__ RowSums p, const ShortRowsConfig config) {
  const int lanes = config.lanes, lane = int(threadIdx.x) % lanes;
  const int step = kSumThreads / lanes;
  const int64_t first = blockIdx.x * config.rows + threadIdx.x / lanes;
  const uint4* rows[kLoads];
#pragma unroll
  for (int r = 0; r < kLoads; ++r) {
    const int64_t row = first + r * step < p.rows.numel ? first + r * step : p.rows.numel - 1;
    const T* data = static_cast<const T*>(p.rows.data) + p.rows.offset_at(row);
    rows[r] = reinterpret_cast<const uint4*>(data);
  }
  compute_t<T> sums[kLoads] = {};
  const int count = int(p.n / kVector<T>);
#pragma unroll 1
  for (int i = lane; i < count; i += lanes) {
    uint4 loaded[kLoads];
#pragma unroll
    for (int r = 0; r < kLoads; ++r) loaded[r] = rows[r][i];
#pragma unroll
    for (int r = 0; r < kLoads; ++r) sums[r] += total_of<T>(loaded[r]);
  }
  for (int other = lanes / 2; other > 0; other /= 2) {
#pragma unroll
    for (int r = 0; r < kLoads; ++r) sums[r] += __shfl_xor_sync(~0u, sums[r], other);
  }
  if (lane != 0) return;
#pragma unroll
  for (int r = 0; r < kLoads; ++r) {
    if (first + r * step < p.rows.numel) store_sum<T>(p.out, nullptr, first + r * step, sums[r]);
  }
}

// A tile of whole rows comes in as 16-byte vectors wherever rows begin. Rows
// whose length is not a multiple of 16 bytes start in different banks, at most two in one.
template <class T>
__global__ void __launch_bounds__(kSumThreads)
    tile_kernel(const __grid_constant__ RowSums p, const ShortRowsConfig config) {
  alignas(16) __shared__ T tile[kTileBytes / sizeof(T)];
  const int thread = int(threadIdx.x);
  const int64_t first = blockIdx.x * config.rows, left = p.rows.numel - first;
  const int rows = int(left < config.rows ? left : config.rows), n = int(p.n);
  const T* data = static_cast<const T*>(p.rows.data) + first * p.n;
  const int elements = rows * n, count = elements / kVector<T>;
  uint4 loaded[kLoads];
#pragma unroll
  for (int u = 0; u < kLoads; ++u) {
    const int i = u * kSumThreads + thread;
    if (i < count) loaded[u] = reinterpret_cast<const uint4*>(data)[i];
  }
#pragma unroll
  for (int u = 0; u < kLoads; ++u) {
    const int i = u * kSumThreads + thread;
    if (i < count) reinterpret_cast<uint4*>(tile)[i] = loaded[u];
  }
  const int tail = count * kVector<T> + thread;
  if (tail < elements) tile[tail] = data[tail];
  __syncthreads();
  const int lanes = config.lanes, lane = thread % lanes;
  for (int base = 0; base < rows; base += kSumThreads / lanes) {
    const int row = base + thread / lanes;
    compute_t<T> sum = 0;
    if (row < rows) {
#pragma unroll 4
      for (int k = lane; k < n; k += lanes) sum += to_compute(tile[row * n + k]);
    }
    sum = lanes_total(sum, lanes);
    if (lane == 0 && row < rows) store_sum<T>(p.out, nullptr, first + row, sum);
  }
}

}  // namespace

// -----------------------------------------------------------------------------

int64_t sum_rows_partials(const RowSums& problem) {
  return partial_sums(problem, current_device());
}

cudaError_t sum_rows_launch(const RowSums& problem, cudaStream_t stream) {
  using Config = ShortRowsConfig;
  const Config config = short_rows_config(problem);
  return visit_floating(problem.rows.dtype, [&](auto tag) {
    using T = decltype(tag);
    if (config.path == Config::kLong) return launch_row_sums<T>(problem, stream);
    if (config.blocks == 0) return cudaSuccess;
    auto* kernel = config.path == Config::kVectors ? vectors_kernel<T> : tile_kernel<T>;
    kernel<<<unsigned(config.blocks), kSumThreads, 0, stream>>>(problem, config);
    return cudaGetLastError();
  });
}
