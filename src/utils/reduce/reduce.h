// The plain description of sums over rows, shared by bindings and kernels. No
// torch, no CUDA.
#pragma once

#include "points.h"
#include "ptx/device_info.h"

namespace cuda_ops {

// out[i] = the sum of `n` elements, `stride` apart, from point i of `rows` on.
struct RowSums {
  Points rows;
  int64_t n = 0;
  int64_t stride = 1;
  void* out = nullptr;       // of the dtype of rows
  void* partials = nullptr;  // workspace of as many values as partial_sums() says
  // How far rows are split, which may be tuned; see reduce_binding.h.
  int blocks_per_sm = 8;  // two waves of four
  int split_bytes = 64;   // at least, of a thread: four 16-byte loads
};

// --- the launch configuration: a value, chosen without a GPU ------------------

constexpr int kSumThreads = 256;

struct RowSumsConfig {
  enum Path { kRuns, kStrided } path = kRuns;
  bool along_rows = false;  // kStrided: neighboring threads on neighboring rows
  int lanes = kSumThreads;  // threads per row: a warp or a block
  int64_t splits = 1;       // of each row, with one partial sum each
  int64_t chunk = 0;        // elements of a split
  int64_t blocks = 0;
};

constexpr int64_t row_sums_blocks(const RowSums& p, const DeviceInfo& device) {
  return p.blocks_per_sm * int64_t(device.sms);
}

// Splits a row while blocks are fewer than that and a split gives each thread its bytes: a second
// kernel adds the partial sums, and less work would not pay for its launch.
inline RowSumsConfig row_sums_config(const RowSums& p, const DeviceInfo& device) {
  const int64_t split_bytes = int64_t(p.split_bytes) * kSumThreads;
  const int64_t wanted = row_sums_blocks(p, device);
  const int64_t bytes = p.n * size_of(p.rows.dtype);
  RowSumsConfig config;
  if (p.n > 1 && p.stride != 1) {
    config.path = RowSumsConfig::kStrided;
    config.along_rows = p.rows.dims > 0 && p.rows.strides[0] < p.stride;
    config.lanes = config.along_rows ? kSumThreads / 32 : 32;
  } else if (bytes <= 4096 || (bytes < 32768 && p.rows.numel >= wanted)) {
    config.lanes = 32;
  }
  const int64_t rows = kSumThreads / config.lanes;  // of a block
  const int64_t row_blocks = (p.rows.numel + rows - 1) / rows;
  const int64_t most = bytes * rows / split_bytes;
  if (most >= 4 && row_blocks > 0 && row_blocks < wanted) {
    config.splits = wanted / row_blocks < most ? wanted / row_blocks : most;
  }
  // Whole passes of the threads, so that every split starts as aligned as its row.
  const int64_t pass = config.path == RowSumsConfig::kRuns ? 16 * config.lanes : 8 * config.lanes;
  config.chunk = ((p.n + config.splits - 1) / config.splits + pass - 1) / pass * pass;
  config.splits = p.n > 0 ? (p.n + config.chunk - 1) / config.chunk : 1;
  config.blocks = row_blocks * config.splits;
  return config;
}

// Returns how many values of 8 bytes the sums need besides their output.
inline int64_t partial_sums(const RowSums& p, const DeviceInfo& device) {
  const RowSumsConfig config = row_sums_config(p, device);
  return config.splits > 1 ? p.rows.numel * config.splits : 0;
}

// --- one sum of everything ----------------------------------------------------

// One block adds up to this many partial sums of the rows. More of them are a row themselves, and
// it adds that row's partial sums. Such a row is not tuned: its room is that of the defaults.
constexpr int64_t kMostFinished = 4096;

// Returns the number of partial sums of the rows, with room for those of that row after them.
inline int64_t full_partial_sums(const RowSums& p, const DeviceInfo& device) {
  const int64_t count = p.rows.numel * row_sums_config(p, device).splits;
  return count == 1 ? 0 : count + (count > kMostFinished ? row_sums_blocks(RowSums(), device) : 0);
}

}  // namespace cuda_ops
