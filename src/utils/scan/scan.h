// The plain description of cumulative sums along a dim, shared by bindings and kernels. No torch,
// no CUDA.
#pragma once

#include "division.h"
#include "dtype.h"
#include "layout.h"
#include "ptx/device_info.h"

namespace cuda_ops {

// out[o][i][c] = the sum of x[o][k][c] over k up to i, or from i on if `reverse`. `out` is dense;
// x[o][i] are `inner` neighbors too.
struct Scan {
  const void* x = nullptr;
  void* out = nullptr;        // of the dtype scan_result(dtype)
  void* workspace = nullptr;  // of as many bytes as scan_workspace() says
  int64_t outer = 1, n = 0, inner = 1;
  int64_t x_outer = 0, x_step = 0;  // from one o, and one i, of x to the next, in elements
  bool reverse = false;
  DType dtype = DType::kUnsupported;
};

// The dtype of sums: that of torch.cumsum.
constexpr DType scan_result(DType dtype) { return dtype == DType::kInt32 ? DType::kInt64 : dtype; }

// What sums run in takes so many bytes.
constexpr int64_t scan_sum_bytes(DType dtype) { return size_of(scan_result(dtype)) == 8 ? 8 : 4; }

// --- the launch configuration: a value, chosen without a GPU ------------------

constexpr int kScanThreads = 512;  // of a block, at most

// Packs that a thread keeps in registers: neighbors along a row, or one below the other.
constexpr int scan_row_packs(int pack) { return pack == 1 ? 8 : 4; }
constexpr int scan_steps(int pack) { return pack == 8 ? 4 : 8; }  // 8: the registers of their sums

// Columns of a block's part are 128 bytes wide: all of a cache line. More lanes would leave fewer
// parts side by side, each of which waits for the one above.
constexpr int most_scan_lanes(int pack) { return pack == 1 ? 32 : 8; }

struct ScanConfig {
  bool columns = false;  // inner > 1
  int pack = 1;          // elements of a load: 16 bytes of the result, or one
  int threads = 0;       // of a block
  int64_t blocks = 0;
  // A line is a row, or columns side by side. Where a block does not hold one, each block has a
  // part of it, and gets the sum of the parts before from the blocks that have them.
  int64_t lines = 0, parts = 1;
  int64_t part = 0;  // packs, or steps along columns
  int64_t rows = 1;  // of a block that holds whole ones
  int lanes = 1;     // packs side by side
  int warps = 1;     // of a line
};

namespace detail {

inline bool rows_in_step(const Scan& p, int64_t pack) {
  const int64_t size = size_of(p.dtype), result = size_of(scan_result(p.dtype));
  const auto place = [&](const void* data, int64_t bytes) {
    return int64_t(reinterpret_cast<uintptr_t>(data) % (pack * bytes)) / bytes;
  };
  return place(p.x, size) == place(p.out, result) &&
         (p.outer == 1 || (p.x_outer - p.n) % pack == 0);
}

inline bool columns_in_packs(const Scan& p, int64_t pack) {
  return p.inner % pack == 0 && p.x_step % pack == 0 && p.x_outer % pack == 0 &&
         is_aligned(p.x, pack * size_of(p.dtype)) && is_aligned(p.out, 16);
}

inline void plan_rows(ScanConfig& config, const Scan& p, const DeviceInfo& device) {
  const int64_t packs = scan_row_packs(config.pack), warp = 32 * packs;  // packs of a warp
  const int64_t most = kScanThreads * packs;
  // A row may begin in the middle of a pack.
  const auto taken = [&](int64_t rows) {
    return ceil_div(rows * p.n + config.pack - 1, config.pack);
  };
  config.lines = p.outer;
  if (taken(1) > most) {
    int64_t part = most;
    while (part > most / 4 && p.outer * ceil_div(taken(1), part) < device.sms) part /= 2;
    config.part = ceil_div(ceil_div(taken(1), ceil_div(taken(1), part)), warp) * warp;
    config.parts = ceil_div(taken(1), config.part);
    config.blocks = config.lines * config.parts;
    config.threads = int(config.part / packs);
    return;
  }
  if (p.x_outer == p.n) {  // rows are neighbors: as many as half of the threads hold
    const int64_t fitting = most / 2 * config.pack / p.n;
    const int64_t shared = ceil_div(p.outer, 2 * int64_t(device.sms));  // few rows: one for each SM
    config.rows = fitting < shared ? fitting : shared;
    if (config.rows >= config.pack)
      config.rows -= config.rows % config.pack;  // so blocks start aligned
    if (config.rows < 1) config.rows = 1;
  }
  config.threads = int(ceil_div(taken(config.rows), warp)) * 32;
  config.blocks = ceil_div(p.outer, config.rows);
}

inline void plan_columns(ScanConfig& config, const Scan& p, const DeviceInfo& device) {
  const int64_t packs = p.inner / config.pack;
  while (config.lanes < most_scan_lanes(config.pack) && config.lanes < packs) config.lanes *= 2;
  const int64_t steps = 32 / config.lanes * scan_steps(config.pack);  // of a warp
  config.lines = p.outer * ceil_div(packs, config.lanes);
  constexpr int kWarps = kScanThreads / 32;
  while (config.warps < kWarps && config.warps * steps < p.n) config.warps *= 2;
  // Few lines: smaller parts, so that there are more of them, unless one is enough.
  while (config.warps > kWarps / 4 && config.warps * steps < p.n &&
         config.lines * ceil_div(p.n, config.warps * steps) < device.sms) {
    config.warps /= 2;
  }
  config.part = config.warps * steps;
  config.parts = ceil_div(p.n, config.part);
  const int warps = config.parts > 1 || config.warps > kWarps / 2 ? config.warps : kWarps / 2;
  config.threads = 32 * warps;
  config.blocks = ceil_div(config.lines, warps / config.warps) * config.parts;
}

}  // namespace detail

inline ScanConfig scan_config(const Scan& p, const DeviceInfo& device) {
  ScanConfig config;
  config.columns = p.inner > 1;
  const int pack = int(16 / size_of(scan_result(p.dtype)));
  if (config.columns) {
    if (detail::columns_in_packs(p, pack)) config.pack = pack;
    detail::plan_columns(config, p, device);
  } else {
    if (detail::rows_in_step(p, pack)) config.pack = pack;
    detail::plan_rows(config, p, device);
  }
  return config;
}

// Parts that are added up together, before those of other groups.
constexpr int kPartsOfGroup = 32;

// The workspace: a word for each part, and then for each group of parts, that says what is known of
// it; a sum of each part; and two of each group, its own and that up to its end.
struct ScanRoom {
  int64_t states;  // parts and groups
  int64_t width;   // numbers of a sum
  int64_t sums;    // bytes before the first sum
  int64_t bytes;

  constexpr ScanRoom(const ScanConfig& config, int64_t sum_bytes)
      : states(config.blocks + groups(config)),
        width(config.columns ? config.lanes * config.pack : 1),
        sums(ceil_div(states * 4, 16) * 16),
        bytes(sums + (config.blocks + 2 * groups(config)) * width * sum_bytes) {}

 private:
  static constexpr int64_t groups(const ScanConfig& config) {
    return config.lines * ceil_div(config.parts, kPartsOfGroup);
  }
};

inline int64_t scan_workspace(const Scan& p, const DeviceInfo& device) {
  const ScanConfig config = scan_config(p, device);
  return config.parts == 1 ? 0 : ScanRoom(config, scan_sum_bytes(p.dtype)).bytes;
}

}  // namespace cuda_ops
