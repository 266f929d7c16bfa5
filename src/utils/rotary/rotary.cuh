// Rotary embeddings on the device: a thread turns the same pairs of several heads, with sines and
// cosines that it reads once. Bound by memory, x in and out.
#pragma once

#include "division.cuh"
#include "rows/rows.cuh"
#include "ptx/capability.h"
#include "rotary/rotary.h"

namespace cuda_ops {

// The problem as a kernel needs it.
struct RotaryWalk : RotaryHeads {
  static constexpr int kOperands = 4;
  void* data[kOperands];
  RotaryConfig config;
  int64_t items;  // groups of heads, of all tokens
  IndexDivider groups;
  int dims;
  struct Dim {
    IndexDivider size;
    int64_t strides[kOperands];
  } by_dim[kMaxDims];

  RotaryWalk(const Rotary& p, const RotaryConfig& chosen)
      : RotaryHeads(p),
        config(chosen),
        items(p.tokens.numel * chosen.groups),
        groups(chosen.groups, items),
        dims(p.tokens.dims) {
    for (int k = 0; k < kOperands; ++k) data[k] = p.tokens.operands[k].data;
    for (int d = 0; d < dims; ++d) {
      by_dim[d].size = IndexDivider(p.tokens.sizes[d], p.tokens.numel);
      for (int k = 0; k < kOperands; ++k) {
        by_dim[d].strides[k] = p.tokens.operands[k].strides[d];
      }
    }
  }

  // Returns an item's group of heads; adds to `offsets` where its token lies in each operand.
  __device__ int64_t group_of(int64_t item, int64_t (&offsets)[kOperands]) const {
    int64_t token = groups(item);
    const int64_t group = item - token * config.groups;
#pragma unroll 1
    for (int d = 0; d < dims; ++d) {
      const Dim& dim = by_dim[d];
      const int64_t above = d < dims - 1 ? dim.size(token) : 0;
      const int64_t i = token - above * dim.size.divisor;
      token = above;
#pragma unroll
      for (int k = 0; k < kOperands; ++k) offsets[k] += i * dim.strides[k];
    }
    return group;
  }
};

namespace detail {

// `kCount` neighbors of a table.
template <class W, int kCount, class C>
__device__ void load_angles(const W* at, C* values) {
  constexpr int kMost = 16 / int(sizeof(W)), kLoad = kCount < kMost ? kCount : kMost;
#pragma unroll
  for (int u = 0; u < kCount; u += kLoad) {
    const auto loaded = *reinterpret_cast<const Elements<W, kLoad>*>(at + u);
#pragma unroll
    for (int v = 0; v < kLoad; ++v) values[u + v] = to_compute(loaded.values[v]);
  }
}

// A pack as a load brings it: 16 bytes, 8, or an element.
template <class T, int kPack>
using Held =
    std::conditional_t<kPack == 1 || kPack * sizeof(T) == 16, Raw<T, kPack>, Elements<T, kPack>>;

template <class T, int kPack>
__device__ void take_apart(const Held<T, kPack>& held, compute_t<T> (&values)[kPack]) {
  if constexpr (std::is_same_v<Held<T, kPack>, Raw<T, kPack>>) {
    unpack<T, kPack>(held, values);
  } else {
#pragma unroll
    for (int v = 0; v < kPack; ++v) values[v] = to_compute(held.values[v]);
  }
}

template <class T, int kPack>
__device__ Held<T, kPack> put_together(const compute_t<T> (&values)[kPack]) {
  if constexpr (std::is_same_v<Held<T, kPack>, Raw<T, kPack>>) {
    return packed<T, kPack>(values);
  } else {
    Held<T, kPack> held;
#pragma unroll
    for (int v = 0; v < kPack; ++v) held.values[v] = from_compute<T>(values[v]);
    return held;
  }
}

// Turns (a, b) by the angle.
template <class C>
__device__ void turn(C& a, C& b, C cosine, C sine) {
  const C x = a, y = b;
  a = x * cosine - y * sine;
  b = y * cosine + x * sine;
}

// Turns the pairs of two packs: each element of one with that of the other, or, interleaved, the
// neighbors in each.
template <class T, int kPack, bool kInterleaved>
__device__ void turn_packs(Held<T, kPack>& first, Held<T, kPack>& second,
                           const compute_t<T> (&cosine)[kPack], const compute_t<T> (&sine)[kPack]) {
  compute_t<T> a[kPack], b[kPack];
  take_apart<T, kPack>(first, a);
  take_apart<T, kPack>(second, b);
#pragma unroll
  for (int v = 0; v < kPack; ++v) {
    if constexpr (kInterleaved && kPack > 1) {
      auto& pack = v < kPack / 2 ? a : b;
      const int i = 2 * v % kPack;
      turn(pack[i], pack[i + 1], cosine[v], sine[v]);
    } else {
      turn(a[v], b[v], cosine[v], sine[v]);
    }
  }
  first = put_together<T, kPack>(a);
  second = put_together<T, kPack>(b);
}

}  // namespace detail

template <class T, class W, int kPack, bool kInterleaved>
__global__ void __launch_bounds__(kRotaryThreads)
    rotary_kernel(const __grid_constant__ RotaryWalk p) {
  using C = compute_t<T>;
  using R = detail::Held<T, kPack>;
  const int64_t item = int64_t(blockIdx.x) * p.config.rows + threadIdx.y;
  if (item >= p.items) return;
  int64_t offsets[RotaryWalk::kOperands] = {};
  const int64_t group = p.group_of(item, offsets);
  T* const out = static_cast<T*>(p.data[0]) + offsets[0];
  const T* const x = static_cast<const T*>(p.data[1]) + offsets[1];
  const W* const cosines = static_cast<const W*>(p.data[2]) + offsets[2];
  const W* const sines = static_cast<const W*>(p.data[3]) + offsets[3];
  const int64_t turned = p.pairs / kPack;
  for (int64_t unit = threadIdx.x; unit < p.config.units; unit += blockDim.x) {
    const bool turns = unit < turned;
    // Where the two packs of this unit start in a head; the last one that is copied may be alone.
    int64_t first = unit * kPack, second = p.pairs + first;
    if (kInterleaved && kPack == 1) {
      first = 2 * unit;
      second = first + 1;
    }
    if (!turns) {
      first = 2 * (p.pairs + (unit - turned) * kPack);
      second = first + kPack;
    }
    const bool is_whole = second < p.dim;
    // The loads of all heads first, then those of the tables.
    R a[kRotaryHeads], b[kRotaryHeads];
#pragma unroll
    for (int u = 0; u < kRotaryHeads; ++u) {
      const int64_t head = group + u * p.config.groups;
      if (u >= p.config.heads || head >= p.heads) continue;
      const T* const at = x + head * p.x_head;
      a[u] = *reinterpret_cast<const R*>(at + first * p.x_step);
      if (is_whole) b[u] = *reinterpret_cast<const R*>(at + second * p.x_step);
    }
    C cosine[kPack], sine[kPack];
    if (turns) {
      if constexpr (kPack == 1) {
        cosine[0] = to_compute(cosines[unit * p.cos_step]);
        sine[0] = to_compute(sines[unit * p.sin_step]);
      } else {
        // Interleaved, each of the two packs holds the pairs of half a pack of the tables.
        constexpr int kParts = kInterleaved ? 2 : 1, kCount = kPack / kParts;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const int64_t at = (part * p.pairs + unit * kPack) / kParts;
          detail::load_angles<W, kCount>(cosines + at, cosine + part * kCount);
          detail::load_angles<W, kCount>(sines + at, sine + part * kCount);
        }
      }
#pragma unroll
      for (int v = 0; v < kPack; ++v) sine[v] = p.inverse ? -sine[v] : sine[v];
    }
#pragma unroll
    for (int u = 0; u < kRotaryHeads; ++u) {
      const int64_t head = group + u * p.config.groups;
      if (u >= p.config.heads || head >= p.heads) continue;
      if (turns) detail::turn_packs<T, kPack, kInterleaved>(a[u], b[u], cosine, sine);
      T* const at = out + head * p.out_head;
      *reinterpret_cast<R*>(at + first * p.out_step) = a[u];
      if (is_whole) *reinterpret_cast<R*>(at + second * p.out_step) = b[u];
    }
  }
}

inline cudaError_t launch_rotary(const Rotary& p, cudaStream_t stream) {
  if (p.tokens.numel == 0 || p.heads == 0) return cudaSuccess;
  const RotaryConfig config = rotary_config(p, current_device());
  if (config.units == 0) return cudaSuccess;
  const RotaryWalk walk(p, config);
  const auto run = [&](auto tag, auto table, auto pack) {
    using T = decltype(tag);
    using W = decltype(table);
    constexpr int kPack = decltype(pack)::value;
    auto* kernel =
        p.interleaved ? rotary_kernel<T, W, kPack, true> : rotary_kernel<T, W, kPack, false>;
    const dim3 threads(unsigned(config.lanes), unsigned(config.rows));
    kernel<<<unsigned(config.blocks), threads, 0, stream>>>(walk);
    return cudaGetLastError();
  };
  return visit_floating(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    constexpr int kMost = 16 / int(sizeof(T));
    const auto with_tables = [&](auto table) {
      if (config.pack == kMost) return run(tag, table, std::integral_constant<int, kMost>{});
      if (config.pack == kMost / 2)
        return run(tag, table, std::integral_constant<int, kMost / 2>{});
      return run(tag, table, std::integral_constant<int, 1>{});
    };
    return p.table_dtype == p.dtype ? with_tables(tag) : with_tables(compute_t<T>{});
  });
}

}  // namespace cuda_ops
