// Gray value of 8-bit RGB. Three bytes in and one out per pixel, so an H200 that
// moves 4.2 TB/s has time for 27 instructions a pixel; the fixed-point sum takes
// about 8. It matters that bytes arrive 16 at a time.
#include "imaging/rgb_to_gray.h"

#include <cuda_runtime.h>

#include <type_traits>

using namespace cuda_ops;

namespace {

constexpr int kThreads = 128;
constexpr int kPixels = 16;          // of a thread: three 16-byte loads, one 16-byte store
constexpr int64_t kSmall = 1 << 22;  // fewer pixels do not fill a GPU with these threads

// --- the launch configuration: a value, chosen without a GPU ------------------

struct RgbToGrayConfig {
  enum Path { kInterleaved, kPlanar, kScalar } path = kScalar;
  int pixels = 1;  // of a thread
  int64_t blocks = 0;
};

// Whole packs of kPixels pixels lie together and are aligned, in every row of
// the points; only those of one row may end with less than a pack.
bool has_packs(const RgbToGray& p, int64_t step) {
  const Points& v = p.pixels;
  if (v.numel < kPixels || v.dims == 0 || v.strides[0] != step) return false;
  if (!is_aligned(v.data, kPixels)) return false;
  for (int d = 1; d < v.dims; ++d) {
    if (v.sizes[0] % kPixels != 0 || v.strides[d] % kPixels != 0) return false;
  }
  return true;
}

RgbToGrayConfig rgb_to_gray_config(const RgbToGray& p) {
  using Config = RgbToGrayConfig;
  Config config;
  if (p.channel == 1 && has_packs(p, 3)) config.path = Config::kInterleaved;
  if (p.channel % kPixels == 0 && has_packs(p, 1)) config.path = Config::kPlanar;
  if (config.path != Config::kScalar) {
    config.pixels = p.pixels.numel < kSmall ? kPixels / 2 : kPixels;
  }
  const int64_t tile = int64_t(kThreads) * config.pixels;
  config.blocks = (p.pixels.numel + tile - 1) / tile;
  // 2^31 - 1 blocks end a grid; the scalar path steps over what is left.
  if (config.blocks > INT32_MAX) config.blocks = INT32_MAX;
  return config;
}

// --- kernels ------------------------------------------------------------------

__device__ uint8_t gray_at(const RgbToGray& p, int64_t pixel) {
  const auto* at = static_cast<const uint8_t*>(p.pixels.data) + p.pixels.offset_at(pixel);
  return uint8_t(weighted(p.weights, at[0], at[p.channel], at[2 * p.channel]) >> 24);
}

template <int kBytes>
struct alignas(kBytes) Words {
  uint32_t words[kBytes / 4];
};

// The parameters that every thread needs, side by side: each line of parameters is a cache miss for
// a kernel that has just started.
struct Packed {
  const uint8_t* data;
  uint8_t* out;
  int64_t channel;
  int64_t numel;
  GrayWeights weights;
};

// kLine: the points are equally far apart.
template <bool kPlanar, int kPack, bool kLine>
__global__ void __launch_bounds__(kThreads)
    packed_kernel(const Packed packed, const __grid_constant__ RgbToGray p) {
  using W = Words<kPack>;
  const int64_t packs = packed.numel / kPack;
  const int64_t pack = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (pack < packs) {
    const int64_t first = pack * kPack;
    const auto* at = packed.data + (kLine ? first * (kPlanar ? 1 : 3) : p.pixels.offset_at(first));
    W in[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      in[i] = *reinterpret_cast<const W*>(at + i * (kPlanar ? packed.channel : kPack));
    }
    const auto byte = [&](int pixel, int channel) {
      const int i = kPlanar ? channel * kPack + pixel : 3 * pixel + channel;
      return in[i / kPack].words[i % kPack / 4] >> (i % 4 * 8) & 255;
    };
    W out;
#pragma unroll
    for (int i = 0; i < kPack / 4; ++i) {
      uint32_t sums[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int pixel = 4 * i + j;
        sums[j] = weighted(packed.weights, byte(pixel, 0), byte(pixel, 1), byte(pixel, 2));
      }
      // The four top bytes, side by side.
      out.words[i] = __byte_perm(__byte_perm(sums[0], sums[1], 0x0073),
                                 __byte_perm(sums[2], sums[3], 0x0073), 0x5410);
    }
    reinterpret_cast<W*>(packed.out)[pack] = out;
  }
  if (blockIdx.x != gridDim.x - 1) return;
  const int64_t tail = packs * kPack + threadIdx.x;
  if (tail < packed.numel) packed.out[tail] = gray_at(p, tail);
}

__global__ void __launch_bounds__(kThreads) scalar_kernel(const __grid_constant__ RgbToGray p) {
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < p.pixels.numel; i += step) {
    p.out[i] = gray_at(p, i);
  }
}

}  // namespace

// -----------------------------------------------------------------------------

cudaError_t rgb_to_gray_launch(const RgbToGray& problem, cudaStream_t stream) {
  using Config = RgbToGrayConfig;
  const Config config = rgb_to_gray_config(problem);
  if (config.blocks == 0) return cudaSuccess;
  const auto blocks = unsigned(config.blocks);
  if (config.path == Config::kScalar) {
    scalar_kernel<<<blocks, kThreads, 0, stream>>>(problem);
    return cudaGetLastError();
  }
  const auto kernel = [&](auto pack) {
    constexpr int kPack = decltype(pack)::value;
    const bool planar = config.path == Config::kPlanar;
    return problem.pixels.dims > 1
               ? (planar ? packed_kernel<true, kPack, false> : packed_kernel<false, kPack, false>)
               : (planar ? packed_kernel<true, kPack, true> : packed_kernel<false, kPack, true>);
  };
  const Points& pixels = problem.pixels;
  const Packed packed{static_cast<const uint8_t*>(pixels.data), problem.out, problem.channel,
                      pixels.numel, problem.weights};
  auto* packed_by = config.pixels < kPixels ? kernel(std::integral_constant<int, kPixels / 2>())
                                            : kernel(std::integral_constant<int, kPixels>());
  packed_by<<<blocks, kThreads, 0, stream>>>(packed, problem);
  return cudaGetLastError();
}
