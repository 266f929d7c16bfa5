// The plain description of a norm over rows and of its gradient, shared by bindings and kernels. No
// torch, no CUDA.
#pragma once

#include "ptx/device_info.h"
#include "rows/rows.h"

namespace cuda_ops {

// kRms: x / sqrt(mean(x^2) + eps) * weight. kLayer: (x - mean) / sqrt(variance + eps) * weight +
// bias. kAddRms: residual += x first, then kRms of the residual.
enum class NormKind { kRms, kLayer, kAddRms };

// `rows` rows of `n` neighbours; the steps from one row to the next are in elements.
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

// Two rows are kept, and for each column a sum or two.
constexpr int most_gradient_packs(int pack) { return pack == 1 ? 16 : 4; }

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
  config.blocks = (p.rows + config.rows() - 1) / config.rows();
  return config;
}

// Each block takes many rows and adds up their part of the gradients of weight and bias; a second
// kernel adds up the blocks' sums. There are as many blocks as fit on the GPU at a time.
inline RowConfig norm_gradient_config(const NormGradient& p, const DeviceInfo& device) {
  const Norm& norm = p.norm;
  RowConfig config;
  const bool aligned = is_aligned(p.grad_out, 16) && is_aligned(p.grad_x, 16);
  config.pack = aligned ? detail::pack_of(norm) : 1;
  const int64_t count = norm.n / config.pack;
  const int most = most_gradient_packs(config.pack);
  detail::share_row(config, count, most / 2, 512, most / 4);
  if (config.packs == 0) detail::share_row(config, count, most, 512, most);
  detail::trim_row(config, count);
  // Of an SM, by the registers that the kernels take: up to 82 a thread, 98 with a bias, and 128
  // where a thread has the most packs (sm_90).
  const int threads = p.grad_bias != nullptr || config.packs == most ? 512 : 768;
  const int64_t resident = device.sms * int64_t(threads / config.threads);
  const int64_t wanted = (norm.rows + config.rows() - 1) / config.rows();
  config.blocks = wanted < 1 ? 1 : wanted < resident ? wanted : resident;
  return config;
}

// Returns how many values the gradients of weight (and bias) need besides their outputs.
inline int64_t norm_partials(const NormGradient& p, const DeviceInfo& device) {
  const int64_t sums = p.grad_bias != nullptr ? 2 : 1;
  return sums * norm_gradient_config(p, device).blocks * p.norm.n;
}

}  // namespace cuda_ops
