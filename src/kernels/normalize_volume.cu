// (x - mean) / divisor of 8- and 16-bit volumes. Six bytes of traffic per
// uint16 voxel to float32. With a volume's own statistics one launch adds up,
// waits for all blocks and normalizes: the second read comes from the cache as
// far as the volume fits (60 MB of L2 on an H200), which is why it runs backwards.
#include "imaging/normalize_volume.h"

#include <cooperative_groups.h>

#include <cstring>

#include "ptx/capability.h"
#include "reduce/reduce.cuh"

using namespace cuda_ops;

namespace {

constexpr int kThreads = kSumThreads;
constexpr int kBlocksPerSm = 4;

// 16-byte accesses of a thread in flight: many where one wave of blocks does everything, few where
// each block ends with its tile (as in elementwise.cuh): one where SMs would idle, two where a
// second wave of blocks would be short.
constexpr int kOwnUnroll = 4, kGivenUnroll = 2;
constexpr int64_t kUnrollFrom = int64_t(1) << 25;  // voxels
constexpr int64_t kFullSm = 2048 / kThreads;       // blocks

// --- the launch configuration: a value, chosen without a GPU ------------------

struct NormalizeConfig {
  bool packed = false;  // 16-byte accesses
  int unroll = kOwnUnroll;
  int64_t team = 1;  // blocks that share a volume
  int64_t blocks = 0;
};

// Less than 64 bytes of a volume for each thread is not worth the wait for it.
NormalizeConfig normalize_config(const NormalizeVolume& p, const DeviceInfo& device) {
  const int64_t sms = device.sms;
  NormalizeConfig config;
  const bool whole = p.volumes == 1 || p.each % 16 == 0;
  config.packed = whole && p.voxels.is_line(1) && is_aligned(p.voxels.data, 16);
  const int pack = p.own_statistics ? 16 / int(size_of(p.voxels.dtype)) : p.to_half ? 8 : 4;
  if (!p.own_statistics) {
    const int64_t wave = sms * kFullSm * kThreads * (config.packed ? pack : 1);
    const bool one_wave = p.each > wave && p.each <= kGivenUnroll * wave;
    config.unroll = one_wave || p.each >= kUnrollFrom ? kGivenUnroll : 1;
  }
  const int64_t tile = int64_t(kThreads) * config.unroll * (config.packed ? pack : 1);
  const int64_t tiles = (p.each + tile - 1) / tile;
  if (!p.own_statistics) {
    config.team = config.blocks = tiles < INT32_MAX ? tiles : INT32_MAX;
    return config;
  }
  const int64_t resident = sms * kBlocksPerSm < 1024 ? sms * kBlocksPerSm : 1024;
  const int64_t share = p.volumes < resident ? resident / p.volumes : 1;
  config.team = tiles < share ? tiles : share;
  const int64_t teams = config.team > 1 ? resident / config.team : INT32_MAX;
  config.blocks = config.team * (p.volumes < teams ? p.volumes : teams);
  return config;
}

// --- sums ---------------------------------------------------------------------

__device__ void add_voxels(Moments& m, uint32_t word, uint8_t) {
  m.sum += __dp4a(word, 0x01010101u, 0u);
  m.squares += __dp4a(word, word, 0u);
}
__device__ void add_voxels(Moments& m, uint32_t word, uint16_t) {
  const uint32_t low = word & 0xffff, high = word >> 16;
  m.sum += low + high;
  m.squares += uint64_t(low) * low;
  m.squares += uint64_t(high) * high;
}

// Adds up this thread's part of the voxels from `first` on, as thread `at` of `threads`.
template <class In, bool kPacked>
__device__ Moments thread_total(const NormalizeVolume& p, int64_t first, int64_t at,
                                int64_t threads) {
  Moments total;
  const In* data = static_cast<const In*>(p.voxels.data);
  int64_t rest = 0;
  if constexpr (kPacked) {
    constexpr int kPack = 16 / int(sizeof(In)), kUnroll = kOwnUnroll;
    const uint4* packs = reinterpret_cast<const uint4*>(data + first);
    const int64_t count = p.each / kPack;
    for (int64_t i = at; i < count; i += kUnroll * threads) {
      uint4 loaded[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t pack = i + u * threads;
        loaded[u] = pack < count ? packs[pack] : uint4{};
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        add_voxels(total, loaded[u].x, In());
        add_voxels(total, loaded[u].y, In());
        add_voxels(total, loaded[u].z, In());
        add_voxels(total, loaded[u].w, In());
      }
    }
    rest = count * kPack;
  }
  for (int64_t i = rest + at; i < p.each; i += threads) {
    const uint64_t v = data[p.voxels.offset_at(first + i)];
    total.sum += v;
    total.squares += v * v;
  }
  return total;
}

// --- scaling ------------------------------------------------------------------

// A mean in one float32 may be off by 2^-9, which is much beside a small deviation; in two parts it
// is not, and x - whole is exact. The quotient is that of an IEEE division (Markstein, 1990) in 3
// instructions instead of 10.
struct Affine {
  float whole, rest, divisor, reciprocal;

  __host__ __device__ explicit Affine(const Scaling& scaling)
      : whole(float(rint(scaling.mean))),
        rest(float(scaling.mean - double(whole))),
        divisor(float(scaling.divisor)),
        reciprocal(1 / divisor) {}

  __device__ float operator()(float x) const {
    const float centred = (x - whole) - rest;
    const float quotient = centred * reciprocal;
    return fmaf(fmaf(-quotient, divisor, centred), reciprocal, quotient);
  }
};

// A store of 16 bytes, and the voxels that go into it, kept as they came: a register for each would
// be too many.
template <class In, class Out>
struct VoxelPack {
  static constexpr int kSize = 16 / int(sizeof(Out));
  struct alignas(kSize * sizeof(In)) Source {
    uint32_t words[kSize * sizeof(In) / 4];
  };

  __device__ static uint4 scaled(const Affine& affine, const Source& source) {
    struct alignas(16) {
      Out values[kSize];
    } target;
#pragma unroll
    for (int k = 0; k < kSize; ++k) {
      const int byte = k * int(sizeof(In));
      const In voxel = In(source.words[byte / 4] >> (byte % 4 * 8));
      target.values[k] = from_compute<Out>(affine(float(voxel)));
    }
    uint4 bits;
    memcpy(&bits, &target, sizeof bits);
    return bits;
  }
};

// Scales the voxels in reverse order: those read last come first.
template <class In, class Out, bool kPacked>
__device__ void scale(const NormalizeVolume& p, const Affine& affine, int64_t first, int64_t at,
                      int64_t threads) {
  const In* data = static_cast<const In*>(p.voxels.data);
  Out* out = static_cast<Out*>(p.out) + first;
  int64_t rest = 0;
  if constexpr (kPacked) {
    using P = VoxelPack<In, Out>;
    using Source = typename P::Source;
    const auto* sources = reinterpret_cast<const Source*>(data + first);
    const int64_t count = p.each / P::kSize;
    for (int64_t i = count - 1 - at; i >= 0; i -= kOwnUnroll * threads) {
      Source loaded[kOwnUnroll];
#pragma unroll
      for (int u = 0; u < kOwnUnroll; ++u) {
        if (i - u * threads >= 0) loaded[u] = sources[i - u * threads];
      }
#pragma unroll
      for (int u = 0; u < kOwnUnroll; ++u) {
        if (i - u * threads < 0) break;
        // Keeps out of the way of voxels in the cache that are read again later.
        uint4* to = reinterpret_cast<uint4*>(out) + i - u * threads;
        __stcs(to, P::scaled(affine, loaded[u]));
      }
    }
    rest = count * P::kSize;
  }
  for (int64_t i = rest + at; i < p.each; i += threads) {
    out[i] = from_compute<Out>(affine(float(data[p.voxels.offset_at(first + i)])));
  }
}

// --- kernels ------------------------------------------------------------------

template <class In, class Out, int kUnroll>
__global__ void __launch_bounds__(kThreads)
    scale_packs_kernel(const In* data, Out* out, uint64_t numel, const Affine affine) {
  using P = VoxelPack<In, Out>;
  const uint64_t packs = numel / P::kSize;
  const uint64_t first = uint64_t(blockIdx.x) * (kThreads * kUnroll) + threadIdx.x;
  typename P::Source loaded[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const uint64_t at = first + u * kThreads;
    if (at < packs) loaded[u] = reinterpret_cast<const typename P::Source*>(data)[at];
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const uint64_t at = first + u * kThreads;
    if (at < packs) reinterpret_cast<uint4*>(out)[at] = P::scaled(affine, loaded[u]);
  }
  if (blockIdx.x != gridDim.x - 1) return;
  const uint64_t tail = packs * P::kSize + threadIdx.x;
  if (tail < numel) out[tail] = from_compute<Out>(affine(float(data[tail])));
}

template <class In, class Out>
__global__ void __launch_bounds__(kThreads)
    scale_kernel(const __grid_constant__ NormalizeVolume p, const Affine affine) {
  const int64_t at = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  scale<In, Out, false>(p, affine, 0, at, int64_t(gridDim.x) * kThreads);
}

template <class In, class Out, bool kPacked>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    normalize_kernel(const __grid_constant__ NormalizeVolume p, const int64_t team) {
  const int64_t teams = gridDim.x / team, threads = team * kThreads;
  const int64_t at = blockIdx.x % team * kThreads + threadIdx.x;
  Moments* partials = p.partials;
  // Every block takes as many rounds, since all of them meet in each.
  for (int64_t first = 0; first < p.volumes; first += teams) {
    const int64_t volume = first + blockIdx.x / team, start = volume * p.each;
    const bool here = volume < p.volumes;
    Moments total;
    if (here) total = thread_total<In, kPacked>(p, start, at, threads);
    total = {block_total(total.sum), block_total(total.squares)};
    if (team > 1) {
      if (threadIdx.x == 0) partials[blockIdx.x] = total;
      cooperative_groups::this_grid().sync();
      total = {};
      for (int64_t i = threadIdx.x; i < team; i += kThreads) {
        total.sum += partials[blockIdx.x / team * team + i].sum;
        total.squares += partials[blockIdx.x / team * team + i].squares;
      }
      total = {block_total(total.sum), block_total(total.squares)};
      // The next round writes elsewhere, while others still read these.
      partials = partials == p.partials ? p.partials + kMostPartials / 2 : p.partials;
    }
    const double spread = variance(total, uint64_t(p.each));
    Scaling scaling;
    scaling.mean = double(total.sum) / double(p.each);
    scaling.divisor = spread > 0 ? sqrt(spread) : 1;  // constant: x - mean is 0
    if (here) scale<In, Out, kPacked>(p, Affine(scaling), start, at, threads);
  }
}

template <class In, class Out>
cudaError_t start(NormalizeVolume p, const NormalizeConfig& config, cudaStream_t stream) {
  const dim3 blocks(static_cast<unsigned>(config.blocks)), threads(kThreads);
  if (!p.own_statistics) {
    const Affine affine(p.given);
    if (config.packed) {
      const auto kernel = config.unroll == 1 ? scale_packs_kernel<In, Out, 1>
                                             : scale_packs_kernel<In, Out, kGivenUnroll>;
      kernel<<<blocks, threads, 0, stream>>>(static_cast<const In*>(p.voxels.data),
                                             static_cast<Out*>(p.out), p.each, affine);
    } else {
      scale_kernel<In, Out><<<blocks, threads, 0, stream>>>(p, affine);
    }
    return cudaGetLastError();
  }
  const auto kernel =
      config.packed ? normalize_kernel<In, Out, true> : normalize_kernel<In, Out, false>;
  if (config.team == 1) {
    kernel<<<blocks, threads, 0, stream>>>(p, 1);
    return cudaGetLastError();
  }
  // Blocks that wait for each other must all be resident.
  int64_t team = config.team;
  void* arguments[] = {&p, &team};
  const void* address = reinterpret_cast<const void*>(kernel);
  return cudaLaunchCooperativeKernel(address, blocks, threads, arguments, 0, stream);
}

template <class In>
cudaError_t start(const NormalizeVolume& p, const NormalizeConfig& config, cudaStream_t stream) {
  return p.to_half ? start<In, Half>(p, config, stream) : start<In, float>(p, config, stream);
}

}  // namespace

// -----------------------------------------------------------------------------

cudaError_t normalize_volume_launch(const NormalizeVolume& problem, cudaStream_t stream) {
  if (problem.voxels.numel == 0) return cudaSuccess;
  const NormalizeConfig config = normalize_config(problem, current_device());
  return problem.voxels.dtype == DType::kUInt8 ? start<uint8_t>(problem, config, stream)
                                               : start<uint16_t>(problem, config, stream);
}
