// Packs on the device: 16 bytes of neighbours, or a single element, as they are in memory and as
// they are computed with.
#pragma once

#include <type_traits>

#include "dtype.cuh"

namespace cuda_ops {

// What a load brings stays as it came until it is used: a register for each 16-bit element would be
// twice as many.
template <class T, int kPack>
using Raw = std::conditional_t<kPack == 1, T, uint4>;

template <class T, int kPack>
__device__ void unpack_vector(uint4 raw, compute_t<T>* values) {
  static_assert(kPack * sizeof(T) == 16);
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
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
    unpack_vector<T, kPack>(raw, values);
  }
}

template <class T, int kPack>
__device__ Raw<T, kPack> packed(const compute_t<T> (&values)[kPack]) {
  if constexpr (kPack == 1) {
    return from_compute<T>(values[0]);
  } else {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 2) {
        words[i] = from_compute(values[2 * i], values[2 * i + 1], T{});
      } else if constexpr (sizeof(T) == 4) {
        words[i] = __float_as_uint(values[i]);
      } else {
        const double value = values[i / 2];
        words[i] = uint32_t(i % 2 == 0 ? __double2loint(value) : __double2hiint(value));
      }
    }
    return {words[0], words[1], words[2], words[3]};
  }
}

}  // namespace cuda_ops
