// Which kernel multiplies given matrices on a given GPU: a value, chosen by a pure
// function of sizes, strides, alignment and device. No torch, no CUDA.
//
//   gemv     plain loads     up to 2 rows (or columns) of float32, K-major
//   stream   mma.sync        a few rows (or columns) of 16-bit, K-major, from 8.0 on: up to 8
//                            where the hopper kernel runs, up to 32 elsewhere
//   hopper   TMA + wgmma     16-bit, tf32 and tf32x3 on compute capability 9.0; reads copies where
//                            it cannot read operands as they lie, and copying pays
//   mma      mma.sync        the same from 8.0 on, any layout
//   fma      multiply-adds   float32 from 8.0 on
//   simt     multiply-adds   float64, GPUs before 8.0, and 16-bit where K is 0
#pragma once

#include "gemm/gemm_fma.h"
#include "gemm/gemm_pack.h"
#include "gemm/gemm_stream.h"

namespace cuda_ops {

struct GemmPlan {
  enum Family { kNothing, kGemv, kStream, kHopper, kMma, kFma, kSimt } family = kNothing;
  int tile = 0;         // kMma and kSimt: rows and columns
  bool swap = false;    // kGemv: the vectors are columns of b
  StreamConfig stream;  // kStream
  FmaConfig fma;        // kFma
  HopperConfig hopper;  // kHopper
  GemmPack pack;        // kHopper: the copies before it

  std::string text() const {
    switch (family) {
      case kNothing: return "nothing";
      case kHopper: {
        const std::string copied = pack.a ? pack.b ? "pack a b, " : "pack a, " : "pack b, ";
        return (pack.any() ? copied : "") + "hopper " + hopper.text();
      }
      case kGemv: return swap ? "gemv swapped" : "gemv";
      case kStream: return "stream " + stream.text();
      case kFma: return "fma " + fma.text();
      case kMma: return "mma " + std::to_string(tile);
      case kSimt: return "simt " + std::to_string(tile);
    }
    return "";
  }
};

// Rows of float32 that plain loads keep up with.
constexpr int64_t kGemvVectors = 2;

// Whether gemv and stream can read a line-by-K operand: dense K of whole aligned vectors.
inline bool gemv_lines(const Matmul& p, int operand, int64_t line, int64_t k, int64_t lines) {
  const int64_t bytes = size_of(p.batch.dtype);
  const auto whole = [&](int64_t stride) { return stride * bytes % 16 == 0; };
  if (!is_aligned(p.batch.operands[operand].data, 16)) return false;
  for (int d = 0; d < p.batch.dims; ++d) {
    if (!whole(p.batch.operands[operand].strides[d])) return false;
  }
  return k == 1 && whole(p.k) && (lines == 1 || whole(line));
}

// Chooses among the kernels that read any layout. Large tiles reuse more of the bytes they load;
// small ones serve where large ones would leave SMs idle.
inline GemmPlan tiled_plan(const Matmul& p, const DeviceInfo& device, bool tensor_cores,
                           bool linear) {
  GemmPlan plan;
  plan.family = tensor_cores && device.capability >= 80 ? GemmPlan::kMma : GemmPlan::kSimt;
  const int64_t large = ceil_div(p.m, 128) * ceil_div(p.n, 128) * p.batch.numel;
  plan.tile = plan.family == GemmPlan::kMma && large >= device.sms ? 128 : 64;
  // On an H200 multiply-adds take half the time of three products on mma.sync, at 4096^3.
  const bool float32 = p.batch.dtype == DType::kFloat32;
  const bool multiply_adds =
      float32 && (plan.family == GemmPlan::kSimt || (is_split(p) && device.capability == 90));
  if (multiply_adds && device.capability >= 80) {
    plan.family = GemmPlan::kFma;
    plan.fma = fma_config(p, device, linear);
  }
  return plan;
}

// Estimates the microseconds of such a plan on an H200, where multiply-adds do the work of tf32x3.
// For kMma: whole tiles at the rate, in TFLOP/s, that 4096^3 reached there; the rate of tf32
// without vectors was not measured.
inline double tiled_time(const Matmul& p, const GemmPlan& plan, const DeviceInfo& device) {
  if (plan.family == GemmPlan::kFma) return plan.fma.time;
  const bool vectors = whole_vectors(p, 1, p.a) && whole_vectors(p, 2, p.b);
  const double rate = size_of(p.batch.dtype) == 4 ? (vectors ? 101 : 50) : (vectors ? 239 : 55);
  const double tiles =
      double(ceil_div(p.m, plan.tile)) * double(ceil_div(p.n, plan.tile)) * double(p.batch.numel);
  const double busy = (tiles < device.sms ? device.sms : tiles) * plan.tile * plan.tile * p.k;
  return 4 + 2 * busy / (rate * 1e6);
}

// `linear`: chooses among the kernels that gemm.cuh has for a layer.
inline GemmPlan gemm_plan(const Matmul& p, const DeviceInfo& device, bool linear = false) {
  GemmPlan plan;
  if (p.m == 0 || p.n == 0 || p.batch.numel == 0) return plan;
  const DType dtype = p.batch.dtype;
  const bool halves = size_of(dtype) == 2, hopper = device.capability == 90 && p.built_for_hopper;
  const int64_t vectors = p.m < p.n ? p.m : p.n, lines = p.m < p.n ? p.n : p.m;
  const bool k_major =
      p.k > 0 && gemv_lines(p, 1, p.a.row, p.a.col, p.m) && gemv_lines(p, 2, p.b.col, p.b.row, p.n);
  if (k_major && vectors <= kGemvVectors && dtype == DType::kFloat32 &&
      lines * p.batch.numel < 1LL << 31) {
    plan.family = GemmPlan::kGemv;
    plan.swap = p.n < p.m;
    return plan;
  }
  if (k_major && vectors <= stream_vectors(hopper, p.k) && halves && device.capability >= 80 &&
      p.out.col == 1) {
    plan.stream = stream_config(p, device);
    if (plan.stream.possible) {
      plan.family = GemmPlan::kStream;
      return plan;
    }
  }
  const bool tensor_cores =
      p.k > 0 && (halves || (dtype == DType::kFloat32 && p.precision != Precision::kIeee));
  const GemmPlan tiled = tiled_plan(p, device, tensor_cores, linear);
  if (!tensor_cores || !hopper || batch_step(p, 0) < 0) return tiled;
  const auto hopper_plan = [&](const GemmPack& pack) {
    GemmPlan made;
    made.family = GemmPlan::kHopper;
    made.pack = pack;
    // Fewer than 2^31 blocks copy, each at least 128 bytes.
    if (pack.bytes() >= 1LL << 38) return made;
    made.hopper = hopper_config(packed(p, pack, nullptr), int(size_of(dtype)), device, linear);
    if (pack.any()) made.hopper.time += pack_time(p, pack);
    return made;
  };
  plan = hopper_plan(needed_pack(p, linear));
  // Rows that do not continue across the batch, such as those of a transposed one, do so in a copy.
  if (p.batch.numel > 1 && batch_step(p, 2) == 0 && !plan.pack.a) {
    const GemmPlan copied = hopper_plan(pack_of(p, true, plan.pack.b));
    const bool faster = !plan.hopper.possible || copied.hopper.time < plan.hopper.time;
    if (copied.hopper.possible && faster) plan = copied;
  }
  const bool pays = !plan.pack.any() || plan.hopper.time < tiled_time(p, tiled, device);
  return plan.hopper.possible && pays ? plan : tiled;
}

}  // namespace cuda_ops
