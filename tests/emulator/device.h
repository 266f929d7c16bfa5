// CUDA's names for a C++ compiler: what translated sources include before all else.
#pragma once

#include "emulator.h"
#include "ptx.h"

// --- keywords -------------------------------------------------------------------

#undef __launch_bounds__
#undef __grid_constant__
#undef __forceinline__
#undef __device__
#undef __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define __forceinline__ inline
#define __device__
#define __global__
// sm_90a, with the kernels for other GPUs: everything is compiled, and a plan decides what runs.
#define CUDA_OPS_EVERY_KERNEL
#define __CUDA_ARCH__ 900
#define __CUDA_ARCH_FEAT_SM90_ALL 1

// --- built-in variables ---------------------------------------------------------

namespace emulator {

// A number that differs between the fibers that read it.
template <class Value>
struct Index {
  struct {
    operator unsigned() const { return Value::x(); }
  } x;
  struct {
    operator unsigned() const { return Value::y(); }
  } y;
};
struct ThreadIndex {
  static unsigned x() { return unsigned(thread) % block_width; }
  static unsigned y() { return unsigned(thread) / block_width; }
};
struct BlockIndex {
  static unsigned x() { return block->index % grid_width; }
  static unsigned y() { return block->index / grid_width; }
};
struct GridSize {
  static unsigned x() { return grid_width; }
  static unsigned y() { return grid_blocks / grid_width; }
};
struct BlockSize {
  static unsigned x() { return block_width; }
  static unsigned y() { return block_threads / block_width; }
};

}  // namespace emulator

inline const emulator::Index<emulator::ThreadIndex> threadIdx;
inline const emulator::Index<emulator::BlockIndex> blockIdx;
inline const emulator::Index<emulator::GridSize> gridDim;
inline const emulator::Index<emulator::BlockSize> blockDim;

// --- functions ------------------------------------------------------------------

using std::fma;
using std::fmaf;
using std::max;
using std::min;

inline uint64_t __cvta_generic_to_shared(const void* pointer) {
  return emulator::shared_address(pointer);
}

inline size_t __cvta_generic_to_global(const void* pointer) { return size_t(pointer); }
inline void* __cvta_global_to_generic(size_t pointer) { return reinterpret_cast<void*>(pointer); }

inline void __syncthreads() { emulator::block_barrier(0, emulator::block_threads); }
inline void __syncwarp() { emulator::exchange({}); }

// `width` lanes that are neighbors exchange among themselves.
template <class V>
V __shfl_sync(unsigned, V value, int lane, int width = 32) {
  const int first = emulator::thread % 32 / width * width;
  return emulator::value_of_lane(value, first + (lane & (width - 1)));
}
template <class V>
V __shfl_up_sync(unsigned, V value, unsigned delta, int width = 32) {
  const int lane = emulator::thread % 32, from = lane - int(delta);
  return emulator::value_of_lane(value, from < lane / width * width ? lane : from);
}
template <class V>
V __shfl_down_sync(unsigned, V value, unsigned delta) {
  const int from = emulator::thread % 32 + int(delta);
  return emulator::value_of_lane(value, from > 31 ? from - int(delta) : from);
}
template <class V>
V __shfl_xor_sync(unsigned, V value, unsigned mask) {
  return emulator::value_of_lane(value, (emulator::thread % 32) ^ int(mask));
}

inline unsigned __ballot_sync(unsigned, bool vote) { return emulator::ballot(vote); }

inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  const emulator::Words* all = emulator::exchange({{value}});
  for (int i = 0; i < 32; ++i) value = std::max(value, all[i].w[0]);
  return value;
}

inline bool __all_sync(unsigned lanes, bool vote) { return __ballot_sync(lanes, vote) == ~0u; }
inline bool __any_sync(unsigned lanes, bool vote) { return __ballot_sync(lanes, vote) != 0; }
inline unsigned __reduce_or_sync(unsigned, unsigned value) {
  const emulator::Words* all = emulator::exchange({{value}});
  for (int i = 0; i < 32; ++i) value |= all[i].w[0];
  return value;
}

inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i)
    result |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return result;
}

inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }

inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz(unsigned(value)); }
inline int __clzll(long long value) { return value == 0 ? 64 : __builtin_clzll(value); }
inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }

template <class V>
V __ldg(const V* from) {
  if (reinterpret_cast<uintptr_t>(from) % sizeof(V) != 0) emulator::fail("an unaligned __ldg");
  emulator::check_waited();
  emulator::check_read(from, sizeof(V));
  return *from;
}
template <class V>
V __ldcs(const V* from) {
  return *from;
}
template <class V>
V __ldcg(const V* from) {
  return *from;
}
template <class V>
void __stwb(V* to, V value) {
  if (reinterpret_cast<uintptr_t>(to) % sizeof(V) != 0) emulator::fail("an unaligned __stwb");
  *to = value;
}

// Fibers change places only where they wait.
template <class V>
V atomicAdd(V* to, V value) {
  return std::exchange(*to, *to + value);
}
inline unsigned atomicOr(unsigned* to, unsigned value) { return std::exchange(*to, *to | value); }

inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline long long __double_as_longlong(double value) {
  long long bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline double __longlong_as_double(long long bits) {
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline int __double2loint(double value) {
  int halves[2];
  std::memcpy(halves, &value, sizeof halves);
  return halves[0];
}
inline int __double2hiint(double value) {
  int halves[2];
  std::memcpy(halves, &value, sizeof halves);
  return halves[1];
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __hiloint2double(int high, int low) {
  const uint64_t bits = uint64_t(uint32_t(high)) << 32 | uint32_t(low);
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline int __float2int_rn(float value) {
  return std::isnan(value) ? 0 : int(std::nearbyint(value));
}
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }

template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int bytes) {
  return bytes <= int(emulator::kMostShared) ? cudaSuccess : cudaErrorInvalidValue;
}
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel*, int, size_t) {
  *blocks = 1;
  return cudaSuccess;
}
