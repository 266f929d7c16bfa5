// Keys and values of new tokens written to their slots of a paged cache: bound by memory, each row
// read and written once. Slots are read from memory, so they are compared with the cache here.
#include <type_traits>

#include "cache/cache_write.h"
#include "division.cuh"
#include "narrow.cuh"
#include "ptx/capability.h"

using namespace cuda_ops;

namespace {

// The problem as a kernel needs it.
struct CacheWalk {
  const int64_t* slots;
  int64_t slots_step, tokens, capacity;
  IndexDivider block, parts_of_token;
  struct Part {
    CacheRows rows;
    int64_t packs;  // of a token
    IndexDivider head;
  } parts[2];

  CacheWalk(const CacheWrite& p, const CacheConfig& config, int first, int last)
      : slots(p.slots),
        slots_step(p.slots_step),
        tokens(p.tokens),
        capacity(p.blocks * p.block),
        block(p.block, capacity),
        parts_of_token(config.parts, config.blocks) {
    for (int i = first; i < last; ++i) {
      Part& part = parts[i - first];
      part.rows = p.parts[i];
      const int64_t packs = part.rows.dim / config.pack;
      part.packs = part.rows.heads * packs;
      if (packs > 0) part.head = IndexDivider(packs, part.packs);
    }
  }
};

template <class C>
constexpr bool kIsEightBits = std::is_same_v<C, Float8E4M3> || std::is_same_v<C, Float8E5M2>;

// The numbers as the cache has them.
template <class C, int kPack, class V>
__device__ Elements<C, kPack> stored(const V (&values)[kPack]) {
  Elements<C, kPack> pack;
#pragma unroll
  for (int v = 0; v < kPack; ++v) {
    if constexpr (!kIsEightBits<C>) {
      pack.values[v] = from_compute<C>(compute_t<C>(values[v]));
    } else if constexpr (kPack == 1) {
      pack.values[v] = C::saturated(float(values[v]));
    } else if (v % 2 == 0) {
      reinterpret_cast<uint16_t*>(pack.values)[v / 2] =
          saturated(float(values[v]), float(values[v + 1]), C{});
    }
  }
  return pack;
}

// The numbers of a row as the cache has them, over its scale if it has one.
template <class C, class T, int kPack>
__device__ Elements<C, kPack> converted(const Elements<T, kPack>& pack, bool is_scaled,
                                        const Quotient& quotient) {
  using V = std::conditional_t<std::is_same_v<C, double>, double, compute_t<T>>;
  if constexpr (std::is_same_v<T, C>) {
    if (!is_scaled) return pack;
  }
  V values[kPack];
#pragma unroll
  for (int v = 0; v < kPack; ++v) values[v] = V(to_compute(pack.values[v]));
  if (is_scaled) {
#pragma unroll
    for (int v = 0; v < kPack; ++v) {
      if constexpr (kIsEightBits<C> && std::is_same_v<V, float>) {
        values[v] = quotient(values[v]);
      } else {
        values[v] /= V(quotient.by);
      }
    }
  }
  return stored<C, kPack>(values);
}

// A thread has one pack of one token: with few registers each, as many threads as fit are resident,
// and as many loads are on their way.
template <class T, class C, int kPack>
__global__ void __launch_bounds__(kCacheThreads, 2048 / kCacheThreads)
    cache_write_kernel(const __grid_constant__ CacheWalk walk) {
  const CacheWalk::Part& part = walk.parts[blockIdx.y];
  const CacheRows& rows = part.rows;
  const int64_t group = walk.parts_of_token(blockIdx.x);
  const int64_t token = group * blockDim.y + threadIdx.y;
  const int64_t at = (blockIdx.x - group * walk.parts_of_token.divisor) * blockDim.x + threadIdx.x;
  if (token >= walk.tokens || at >= part.packs) return;
  const int64_t head = rows.heads == 1 ? 0 : part.head(at);
  const int64_t first = (at - head * part.head.divisor) * kPack;
  // Loaded before the slot is known: one wait for both.
  const int64_t slot = walk.slots[token * walk.slots_step];
  const T* const read = static_cast<const T*>(rows.rows) + token * rows.token_step +
                        head * rows.row_head + first * rows.row_step;
  const auto pack = *reinterpret_cast<const Elements<T, kPack>*>(read);
  const float scale = rows.scale != nullptr ? *rows.scale : 1;
  if (slot < 0 || slot >= walk.capacity) return;
  const int64_t block = walk.block(slot);
  C* const to = static_cast<C*>(rows.cache) + block * rows.block_step +
                (slot - block * walk.block.divisor) * rows.slot_step + head * rows.cache_head +
                first * rows.cache_step;
  *reinterpret_cast<Elements<C, kPack>*>(to) =
      converted<C>(pack, rows.scale != nullptr, Quotient(scale));
}

cudaError_t launch_parts(const CacheWrite& p, int first, int last, cudaStream_t stream) {
  const CacheConfig config = cache_config(p, first, last);
  if (config.blocks == 0 || p.blocks * p.block == 0) return cudaSuccess;
  const CacheWalk walk(p, config, first, last);
  return visit_floating(p.dtype, [&](auto row) {
    return visit<DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                 DType::kFloat8E4M3, DType::kFloat8E5M2>(
        p.parts[first].cache_dtype, [&](auto cached) {
          using T = decltype(row);
          using C = decltype(cached);
          auto* kernel = config.pack == 1
                             ? cache_write_kernel<T, C, 1>
                             : cache_write_kernel<T, C, cache_pack(sizeof(T), sizeof(C))>;
          const dim3 blocks(unsigned(config.blocks), unsigned(last - first));
          const dim3 threads(unsigned(config.lanes), unsigned(config.rows));
          kernel<<<blocks, threads, 0, stream>>>(walk);
          return cudaGetLastError();
        });
  });
}

}  // namespace

// -----------------------------------------------------------------------------

cudaError_t cache_write_launch(const CacheWrite& problem, cudaStream_t stream) {
  if (problem.parts[0].cache_dtype == problem.parts[1].cache_dtype) {
    return launch_parts(problem, 0, 2, stream);
  }
  const cudaError_t error = launch_parts(problem, 0, 1, stream);
  return error != cudaSuccess ? error : launch_parts(problem, 1, 2, stream);
}
