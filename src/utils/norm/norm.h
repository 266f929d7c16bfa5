// The plain description of a norm over rows and of its gradient, shared by bindings and kernels. No
// torch, no CUDA.
#pragma once

#include "division.h"
#include "ptx/device_info.h"
#include "rows/rows.h"

namespace cuda_ops {

// kRms: x / sqrt(mean(x^2) + eps) * weight. kLayer: (x - mean) / sqrt(variance + eps) * weight +
// bias. kAddRms: residual += x first, then kRms of the residual.
enum class NormKind { kRms, kLayer, kAddRms };

// `rows` rows of `n` neighbors; the steps from one row to the next are in elements.
struct Norm {
  const void* x = nullptr;
  const void* weight = nullptr;
  const void* bias = nullptr;  // kLayer
  void* residual = nullptr;    // kAddRms
  void* out = nullptr;
  int64_t rows = 0, n = 0;
  int64_t x_step = 0, residual_step = 0, out_step = 0;
  double eps = 0;
  DType dtype = DType::kUnsupported;
  DType weight_dtype = DType::kUnsupported;  // of weight and bias: dtype, or what it computes in
};

// The gradient: x, grad_out and grad_x are dense rows. The gradients of weight and bias have the
// dtype of `Norm::weight_dtype`.
struct NormGradient {
  Norm norm;  // x, weight, rows, n, eps and dtypes
  const void* grad_out = nullptr;
  void* grad_x = nullptr;
  void* grad_weight = nullptr;
  void* grad_bias = nullptr;  // kLayer
  void* partials = nullptr;   // workspace of as many values as norm_partials() says
};

// --- the launch configuration: a value, chosen without a GPU ------------------

// The most packs that a thread has; a half or a quarter of them are the other choices.
constexpr int most_packs(int pack) { return pack == 1 ? 16 : 4; }

// For each column a sum is kept, or two.
constexpr int most_gradient_packs(int pack) { return pack == 1 ? 16 : pack == 8 ? 4 : 8; }

constexpr int kMostStages = 3;

struct NormGradientConfig : RowConfig {
  int stages = 0;  // rows that are on their way into shared memory while others are worked on
  int64_t shared_bytes = 0;
};

namespace detail {

// Elements of a pack of x, and of as many weights. Rows whose bytes are whole packs of 8 alone are
// common enough, such as 4100 numbers of two bytes.
inline int pack_of(const Norm& p) {
  const int64_t size = size_of(p.dtype);
  for (const int64_t bytes : {int64_t(16), int64_t(8)}) {
    const bool whole = p.n * size % bytes == 0 && whole_packs(p.x, p.x_step, size, bytes) &&
                       whole_packs(p.residual, p.residual_step, size, bytes) &&
                       whole_packs(p.out, p.out_step, size, bytes) && is_aligned(p.weight, 16) &&
                       is_aligned(p.bias, 16);
    if (whole) return int(bytes / size);
  }
  return 1;
}

}  // namespace detail

inline RowConfig norm_config(const Norm& p, const DeviceInfo& device) {
  RowConfig config;
  config.pack = detail::pack_of(p);
  const int64_t count = p.n / config.pack;
  const int most = most_packs(config.pack);
  detail::share_row(config, count, most, 1024, most / 4);
  detail::spread_row(config, p.rows, device.sms, most / 4);
  detail::trim_row(config, count);
  config.blocks = ceil_div(p.rows, config.rows());
  return config;
}

// Rows of whole packs come through shared memory, where each thread has room for its own packs: of
// x and of grad_out, and with a bias for one more, the first of x.
constexpr int64_t gradient_stage_bytes(const RowConfig& config, int64_t size, bool has_bias) {
  return int64_t(config.threads) * (2 * config.packs + has_bias) * config.pack * size;
}

// Each block takes many rows and adds up their part of the gradients of weight and bias; a second
// kernel adds up the blocks' sums. There are as many blocks as fit on the GPU at a time.
inline NormGradientConfig norm_gradient_config(const NormGradient& p, const DeviceInfo& device) {
  const Norm& norm = p.norm;
  const bool has_bias = p.grad_bias != nullptr;
  NormGradientConfig config;
  const bool aligned = is_aligned(p.grad_out, 16) && is_aligned(p.grad_x, 16);
  config.pack = aligned ? detail::pack_of(norm) : 1;
  const int64_t count = norm.n / config.pack;
  const int most = most_gradient_packs(config.pack);
  detail::share_row(config, count, most / 2, 512, most / 4);
  if (config.packs == 0) detail::share_row(config, count, most, 512, most);
  detail::trim_row(config, count);
  // What the registers of an SM hold: those that the kernels take (sm_90) grow with the columns of
  // a thread, and where single elements do not come through shared memory, a row is in them too.
  const int columns = config.packs * config.pack * (config.pack == 1 ? 4 : 1);
  const int threads = columns > 16 ? 512 : columns * (1 + has_bias) > 16 ? 640 : 1024;
  int64_t resident = threads / config.threads;
  if (config.pack > 1 && config.packs > 0) {
    const int64_t stage = gradient_stage_bytes(config, size_of(norm.dtype), has_bias);
    const int64_t room = device.capability < 80 ? 0 : device.shared_memory_per_block;
    if (resident * stage > room) resident = 1;
    // What is left is the L1 cache, which should keep the weights.
    const int64_t fitting = room / (resident * stage);
    const int64_t beside = (room - norm.n * size_of(norm.weight_dtype)) / (resident * stage);
    const int64_t stages = fitting == 0 ? 0 : beside < 1 ? 1 : beside;
    config.stages = int(stages < kMostStages ? stages : kMostStages);
    config.shared_bytes = config.stages * stage;
    if (config.stages == 0) {  // every row is read again, by a block
      config.packs = 0;
      config.threads = config.lanes = 512;
    }
  }
  if (config.packs > 0 && config.rows() > 1) {  // the sums of its rows, in the end
    const int64_t sums = config.rows() * norm.n * (size_of(norm.dtype) == 8 ? 8 : 4);
    if (config.shared_bytes < sums) config.shared_bytes = sums;
  }
  const int64_t wanted = ceil_div(norm.rows, config.rows()), most_blocks = device.sms * resident;
  config.blocks = wanted < 1 ? 1 : wanted < most_blocks ? wanted : most_blocks;
  return config;
}

// Returns how many values the gradients of weight (and bias) need besides their outputs.
inline int64_t norm_partials(const NormGradient& p, const DeviceInfo& device) {
  const int64_t sums = p.grad_bias != nullptr ? 2 : 1;
  return sums * norm_gradient_config(p, device).blocks * p.norm.n;
}

}  // namespace cuda_ops
