// The plain description of a cross entropy over rows of logits and of its gradient, shared by
// binding and kernels. No torch, no CUDA.
#pragma once

#include "division.h"
#include "ptx/device_info.h"
#include "rows/rows.h"

namespace cuda_ops {

// `rows` rows of `n` neighbors, `step` elements from one row to the next; everything else is
// dense.
struct CrossEntropy {
  const void* logits = nullptr;
  const int64_t* labels = nullptr;  // one a row
  void* loss = nullptr;             // one a row, or one where `is_total`
  // The log of the sum of exponentials of each row; 0 where the row is ignored. In float64: in
  // float32 a large one would be off by as much as the exponents that are left without it.
  double* lse = nullptr;
  int64_t* count = nullptr;    // where `is_total`: the rows that are not ignored
  double* partials = nullptr;  // workspace of as many values as cross_entropy_partials() says
  int64_t rows = 0, n = 0, step = 0;
  int64_t ignore_index = 0;
  double smoothing = 0;
  bool is_total = false, is_mean = false;  // over rows
  DType dtype = DType::kUnsupported;
  // Few long rows are cut into parts until there are so many blocks; it may be tuned.
  int blocks_per_sm = 8;
};

// The losses' gradients come as the losses do: one a row, or one.
struct CrossEntropyGradient {
  CrossEntropy forward;  // lse and count too
  const void* grad_loss = nullptr;
  void* grad_logits = nullptr;  // perhaps the logits: no thread reads what another one writes
  int64_t out_step = 0;
};

// --- the launch configuration: values, chosen without a GPU ---------------------

constexpr int kCrossEntropyPacks = 4;  // that a thread loads at once, of 16 bytes
constexpr int kCrossEntropyThreads = 256;
constexpr int kCrossEntropyMostBlocks = 1 << 15;  // else they take several rows

// How many blocks of kCrossEntropyThreads an SM has at least.
constexpr int cross_entropy_resident(int64_t size) { return size == 8 ? 2 : 3; }

namespace detail {

inline int64_t packs_of(const CrossEntropy& p) {
  const int64_t pack = 16 / size_of(p.dtype);
  return (p.n + pack - 1) / pack;
}

// Whether every row is whole aligned packs.
inline bool is_packs(const CrossEntropy& p) {
  const int64_t size = size_of(p.dtype);
  const auto is_even = [](int64_t bytes) { return bytes % 16 == 0; };
  return is_even(p.n * size) && (p.rows < 2 || is_even(p.step * size)) &&
         is_even(int64_t(reinterpret_cast<uintptr_t>(p.logits)));
}

}  // namespace detail

// Lanes share a row. Where there are few long rows, several blocks do, and a second kernel joins
// their parts. Where a warp or less has a row, it has several, and loads each of them at once.
struct CrossEntropyConfig {
  int threads = 0, lanes = 0;
  int64_t parts = 1;
  int64_t per_part = 0;   // elements
  int64_t per_group = 0;  // rows one behind the other, of the lanes of a row; 0 for rows in steps
  int64_t blocks = 0;     // of the first kernel

  int rows() const { return threads / lanes; }
};

inline CrossEntropyConfig cross_entropy_config(const CrossEntropy& p, const DeviceInfo& device) {
  const int64_t count = detail::packs_of(p);
  RowConfig shared;
  detail::share_row(shared, count, kCrossEntropyPacks, kCrossEntropyThreads);
  CrossEntropyConfig config;
  config.threads = shared.threads;
  config.lanes = shared.lanes;
  config.per_part = p.n;
  const int64_t most_parts = ceil_div(count, config.lanes * kCrossEntropyPacks);
  if (config.rows() == 1 && most_parts > 1 && p.rows > 0 && p.rows < 4 * device.sms) {
    const int64_t wanted = ceil_div(p.blocks_per_sm * int64_t(device.sms), p.rows);
    const int64_t parts = wanted < most_parts ? wanted : most_parts;
    const int64_t packs = ceil_div(ceil_div(count, parts), config.lanes) * config.lanes;
    config.per_part = packs * (16 / size_of(p.dtype));
    config.parts = ceil_div(p.n, config.per_part);
  }
  const int64_t blocks = ceil_div(p.rows, config.rows());
  // A block of short rows that stays asks for the next labels early, and adds up more losses.
  const int64_t resident =
      cross_entropy_resident(size_of(p.dtype)) * (kCrossEntropyThreads / config.threads);
  const int64_t most = config.rows() > 1 ? device.sms * resident : kCrossEntropyMostBlocks;
  config.blocks = config.parts * (blocks < most ? blocks : most);
  if (p.rows > 0 && config.lanes <= 32 && detail::is_packs(p)) {
    config.per_group = ceil_div(p.rows, config.blocks * config.rows());
  }
  return config;
}

// Returns how many values the first kernel hands on: the sums of parts of rows, or of blocks.
inline int64_t cross_entropy_partials(const CrossEntropy& p, const DeviceInfo& device) {
  const CrossEntropyConfig config = cross_entropy_config(p, device);
  if (config.parts > 1) return 3 * p.rows * config.parts;
  return p.is_total ? 2 * config.blocks : 0;
}

// The gradient of each logit depends on no other: blocks of `chunk` packs, several to a row or
// several rows to a block.
struct CrossEntropyGradientConfig {
  int lanes = 4;       // a row
  int64_t chunks = 1;  // of a row
  int64_t blocks = 0;
};

inline CrossEntropyGradientConfig cross_entropy_gradient_config(const CrossEntropy& p) {
  const int64_t count = detail::packs_of(p);
  CrossEntropyGradientConfig config;
  while (config.lanes < kCrossEntropyThreads && config.lanes * kCrossEntropyPacks < count) {
    config.lanes *= 2;
  }
  config.chunks = ceil_div(count, config.lanes * kCrossEntropyPacks);
  config.blocks = config.chunks * ceil_div(p.rows, kCrossEntropyThreads / config.lanes);
  return config;
}

}  // namespace cuda_ops
