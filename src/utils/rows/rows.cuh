// Rows on the device, in packs of 16 or 8 bytes: each is read once into the registers of the
// threads that share it, where that fits, and whatever needs all of the row is taken from there.
#pragma once

#include <type_traits>

#include "dtype.cuh"
#include "ptx/warp.cuh"
#include "rows/rows.h"

namespace cuda_ops {

// --- packs ----------------------------------------------------------------------

// What a load brings stays as it came until it is used: a register for each 16-bit element would be
// twice as many.
template <class T, int kPack>
using Raw =
    std::conditional_t<kPack == 1, T, std::conditional_t<kPack * sizeof(T) == 8, uint2, uint4>>;

// Goes past the L1 cache, which then keeps the weights that all rows read.
template <class V>
__device__ V load_once(const V* at) {
  if constexpr (std::is_same_v<V, uint4>) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
  } else if constexpr (std::is_same_v<V, uint2>) {
    uint2 v;
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                 : "=r"(v.x), "=r"(v.y)
                 : "l"(at)
                 : "memory");
    return v;
  } else {
    return *at;
  }
}

template <class T, class V>
__device__ void unpack_vector(V raw, compute_t<T>* values) {
  constexpr int kWords = int(sizeof(V)) / 4;
  uint32_t words[kWords] = {raw.x, raw.y};
  if constexpr (kWords == 4) {
    words[2] = raw.z;
    words[3] = raw.w;
  }
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    if constexpr (sizeof(T) == 2) {
      float both[2];
      to_compute(words[i], T{}, both);
      values[2 * i] = both[0];
      values[2 * i + 1] = both[1];
    } else if constexpr (sizeof(T) == 4) {
      values[i] = __uint_as_float(words[i]);
    } else if (i % 2 == 0) {
      values[i / 2] = __hiloint2double(int(words[i + 1]), int(words[i]));
    }
  }
}

template <class T, int kPack>
__device__ void unpack(Raw<T, kPack> raw, compute_t<T> (&values)[kPack]) {
  if constexpr (kPack == 1) {
    values[0] = to_compute(raw);
  } else {
    unpack_vector<T>(raw, values);
  }
}

template <class T, int kPack>
__device__ Raw<T, kPack> packed(const compute_t<T> (&values)[kPack]) {
  if constexpr (kPack == 1) {
    return from_compute<T>(values[0]);
  } else {
    constexpr int kWords = kPack * int(sizeof(T)) / 4;
    uint32_t words[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (sizeof(T) == 2) {
        words[i] = from_compute(values[2 * i], values[2 * i + 1], T{});
      } else if constexpr (sizeof(T) == 4) {
        words[i] = __float_as_uint(values[i]);
      } else {
        const double value = values[i / 2];
        words[i] = uint32_t(i % 2 == 0 ? __double2loint(value) : __double2hiint(value));
      }
    }
    if constexpr (kWords == 4) {
      return {words[0], words[1], words[2], words[3]};
    } else {
      return {words[0], words[1]};
    }
  }
}

// --- sums over a row ------------------------------------------------------------

// Adds each of `values` up over the `lanes` threads of a row; all of them get the sums. More than a
// warp are the whole block.
template <int kCount, class C>
__device__ void row_totals(C (&values)[kCount], int lanes) {
#pragma unroll
  for (int k = 0; k < kCount; ++k) values[k] = lanes_total(values[k], lanes < 32 ? lanes : 32);
  if (lanes <= 32) return;
  __shared__ C shared[kCount][32];
  const int warps = lanes / 32, warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  __syncthreads();  // the last call's sums have been read
  if (lane == 0) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) shared[k][warp] = values[k];
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    values[k] = lanes_total(lane < warps ? shared[k][lane] : C(0), 32);
  }
}

template <class C>
__device__ C row_total(C value, int lanes) {
  C values[1] = {value};
  row_totals(values, lanes);
  return values[0];
}

// Joins `value` over the `lanes` threads of a row, as join(a, b) says; all of them get the result.
// `none` changes nothing that it is joined with.
template <class V, class Join>
__device__ V row_joined(V value, int lanes, V none, Join join) {
  const auto join_lanes = [&](int count) {
#pragma unroll
    for (int lane = count / 2; lane > 0; lane /= 2) {
      value = join(value, __shfl_xor_sync(~0u, value, lane));
    }
  };
  join_lanes(lanes < 32 ? lanes : 32);
  if (lanes <= 32) return value;
  __shared__ V shared[32];
  const int warps = lanes / 32, warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  __syncthreads();  // the last call's values have been read
  if (lane == 0) shared[warp] = value;
  __syncthreads();
  value = lane < warps ? shared[lane] : none;
  join_lanes(32);
  return value;
}

// --- a row -------------------------------------------------------------------

// One row of packs, as a thread has it: in registers, or read again from memory each time.
template <class T, int kPack, int kPacks>
struct RowPart {
  using C = compute_t<T>;
  using R = Raw<T, kPack>;
  static constexpr int kKept = kPacks > 0 ? kPacks : 1;

  const R* data;
  int64_t count;  // packs of the row
  int lane, lanes;
  R kept[kKept];

  __device__ RowPart(const void* row, int64_t count, int lane, int lanes)
      : data(static_cast<const R*>(row)), count(count), lane(lane), lanes(lanes) {}

  __device__ void load() {
    if constexpr (kPacks > 0) {
#pragma unroll
      for (int u = 0; u < kPacks; ++u) {
        const int64_t at = lane + u * lanes;
        kept[u] = at < count ? load_once(data + at) : R{};
      }
    }
  }

  // Pack `at`, which is number u of this thread's.
  __device__ void get(int64_t at, int u, C (&values)[kPack]) const {
    if constexpr (kPacks > 0) {
      unpack<T, kPack>(kept[u], values);
    } else {
      unpack<T, kPack>(data[at], values);
    }
  }

  // Calls body(at, u, values) for each pack of this thread; u counts those in registers.
  template <class Body>
  __device__ void each(Body&& body) const {
    C values[kPack];
    if constexpr (kPacks > 0) {
#pragma unroll
      for (int u = 0; u < kPacks; ++u) {
        const int64_t at = lane + u * lanes;
        if (at >= count) break;
        unpack<T, kPack>(kept[u], values);
        body(at, u, values);
      }
    } else {
      for (int64_t at = lane; at < count; at += lanes) {
        unpack<T, kPack>(data[at], values);
        body(at, 0, values);
      }
    }
  }
};

template <class T, int kPack>
__device__ void store_pack(void* row, int64_t at, const compute_t<T> (&values)[kPack]) {
  static_cast<Raw<T, kPack>*>(row)[at] = packed<T, kPack>(values);
}

template <class T>
__device__ T* at_row(const void* data, int64_t offset) {
  return const_cast<T*>(static_cast<const T*>(data)) + offset;
}

namespace detail {

template <int kValue>
using Constant = std::integral_constant<int, kValue>;

}  // namespace detail

}  // namespace cuda_ops
