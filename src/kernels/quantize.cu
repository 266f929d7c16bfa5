// Rows as narrow numbers with a scale each: bound by memory, x in and a byte for each number out.
// The largest magnitude is needed before the first result, so a row is kept in registers.
#include "narrow.cuh"
#include "ptx/capability.h"
#include "quantize/quantize.h"
#include "rows/rows.cuh"

using namespace cuda_ops;

namespace {

// --- kCount narrow numbers as one store -----------------------------------------

template <int kCount>
using Bytes =
    std::conditional_t<kCount == 8, uint2, std::conditional_t<kCount == 4, uint32_t, uint8_t>>;

__device__ uint32_t narrowed(float value, Int8) {
  return uint8_t(Int8::saturated(__float2int_rn(value)).bits);  // NaN becomes 0
}

template <class Q>
__device__ uint32_t narrowed(float value, Q) {
  return Q::saturated(value).bits;
}

// Two numbers in 16 bits, the first in the lower half.
__device__ uint32_t narrowed(float first, float second, Int8 q) {
  return narrowed(first, q) | narrowed(second, q) << 8;
}

template <class Q>
__device__ uint32_t narrowed(float first, float second, Q q) {
  return saturated(first, second, q);
}

template <class Q, int kCount>
__device__ Bytes<kCount> narrowed(const float (&values)[kCount], const Quotient& over) {
  if constexpr (kCount == 1) {
    return uint8_t(narrowed(over(values[0]), Q{}));
  } else {
    uint32_t words[kCount / 4];
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      const float* four = values + 4 * i;
      words[i] = narrowed(over(four[0]), over(four[1]), Q{}) |
                 narrowed(over(four[2]), over(four[3]), Q{}) << 16;
    }
    if constexpr (kCount == 8) {
      return {words[0], words[1]};
    } else {
      return words[0];
    }
  }
}

// --- the kernel -----------------------------------------------------------------

template <class T, class Q, int kPack, int kPacks>
__global__ void __launch_bounds__(1024)
    quantize_kernel(const __grid_constant__ Quantize p, const int lanes) {
  const int rows = int(blockDim.x) / lanes, lane = int(threadIdx.x) % lanes;
  const int64_t wanted = int64_t(blockIdx.x) * rows + int(threadIdx.x) / lanes;
  // Past the last row, lanes go along with those of their warp that have one, and write nothing.
  const bool is_row = wanted < p.rows;
  const int64_t row = is_row ? wanted : p.rows - 1;
  const int64_t count = is_row ? p.n / kPack : 0;
  const int64_t at = p.runs == 1 ? row * p.x_step : row / p.runs * p.x_step + row % p.runs * p.n;
  RowPart<T, kPack, kPacks> x(at_row<T>(p.x, at), count, lane, lanes);
  x.load();
  // As bits, magnitudes have the order of numbers, and NaN is above them all.
  uint32_t largest = 0;
  x.each([&](int64_t, int, const auto& values) {
#pragma unroll
    for (const float value : values) largest = max(largest, __float_as_uint(value) & 0x7fffffff);
  });
  largest = row_joined(largest, lanes, 0u, [](uint32_t a, uint32_t b) { return max(a, b); });
  const float scale = quantization_scale<Q>(__uint_as_float(largest));
  if (is_row && lane == 0) p.scale[row] = scale;
  const Quotient over(scale);
  auto* const q = reinterpret_cast<Bytes<kPack>*>(static_cast<uint8_t*>(p.q) + row * p.n);
  x.each([&](int64_t at, int, const auto& values) { q[at] = narrowed<Q>(values, over); });
}

template <class T, class Q>
cudaError_t launch(const Quantize& p, Q, cudaStream_t stream) {
  const RowConfig config = quantize_config(p, current_device());
  const auto start = [&](auto pack) {
    constexpr int kPack = decltype(pack)::value;
    auto* kernel = config.packs == 1   ? quantize_kernel<T, Q, kPack, 1>
                   : config.packs == 2 ? quantize_kernel<T, Q, kPack, 2>
                   : config.packs == 4 ? quantize_kernel<T, Q, kPack, 4>
                                       : quantize_kernel<T, Q, kPack, 0>;
    kernel<<<unsigned(config.blocks), config.threads, 0, stream>>>(p, config.lanes);
    return cudaGetLastError();
  };
  if (config.pack == 1) return start(detail::Constant<1>{});
  return start(detail::Constant<16 / int(sizeof(T))>{});
}

}  // namespace

cudaError_t quantize_launch(const Quantize& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  return visit<DType::kFloat32, DType::kFloat16, DType::kBFloat16>(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    switch (p.q_dtype) {
      case DType::kFloat8E4M3: return launch<T>(p, Float8E4M3{}, stream);
      case DType::kFloat8E5M2: return launch<T>(p, Float8E5M2{}, stream);
      default: return launch<T>(p, Int8{}, stream);
    }
  });
}
