// The element types on the device: how each is loaded, computed with and stored.
// The twin of dtype.h for the `.cu` side.
#pragma once

#include "dtype.h"
#include "narrow.h"

namespace cuda_ops {

// The bits in memory, and no more. cuda_fp16.h and cuda_bf16.h would cost every kernel half a
// second of nvcc; a kernel that wants their intrinsics includes them and casts its pointers to
// __half or
// __nv_bfloat16, which have the same layout.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// Neighbors that are read and written at once.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Elements {
  T values[kCount];
};

// Arithmetic runs in float64 for float64 and in float32 for everything else.
template <class T> struct Compute {
  using type = float;
};
template <> struct Compute<double> {
  using type = double;
};
template <class T> using compute_t = typename Compute<T>::type;

__device__ inline double to_compute(double value) { return value; }
__device__ inline float to_compute(float value) { return value; }
__device__ inline float to_compute(Half value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
}
// A bfloat16 is the upper half of a float.
__device__ inline float to_compute(BFloat16 value) {
  return __uint_as_float(uint32_t(value.bits) << 16);
}

__device__ inline float to_compute(Float8E4M3 value) { return value.value(); }
__device__ inline float to_compute(Float8E5M2 value) { return value.value(); }
__device__ inline float to_compute(Float8E8M0 value) { return value.value(); }

// Rounded to the nearest, ties to even.
template <class T> __device__ T from_compute(compute_t<T> value) { return value; }
template <> __device__ inline Half from_compute(float value) {
  Half result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
}
template <> __device__ inline Float8E4M3 from_compute(float value) {
  return Float8E4M3::nearest(value);
}
template <> __device__ inline Float8E5M2 from_compute(float value) {
  return Float8E5M2::nearest(value);
}
template <> __device__ inline Float8E8M0 from_compute(float value) {
  return Float8E8M0::nearest(value);
}
template <> __device__ inline BFloat16 from_compute(float value) {
#if __CUDA_ARCH__ >= 800
  BFloat16 result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
#else
  // Adds half a step, and one more to odd ties; a NaN stays one.
  const uint32_t bits = __float_as_uint(value);
  if (value != value) return {uint16_t(0x7fff)};
  return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
#endif
}

// Two neighbors at once, the first in the lower half of a 32-bit word. One
// instruction rounds and packs both.
__device__ inline void to_compute(uint32_t word, Half, float (&values)[2]) {
  values[0] = to_compute(Half{uint16_t(word)});
  values[1] = to_compute(Half{uint16_t(word >> 16)});
}
__device__ inline void to_compute(uint32_t word, BFloat16, float (&values)[2]) {
  values[0] = __uint_as_float(word << 16);
  values[1] = __uint_as_float(word & 0xffff0000u);
}
__device__ inline uint32_t from_compute(float first, float second, Half) {
#if __CUDA_ARCH__ >= 800
  uint32_t word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  return word;
#else
  return from_compute<Half>(first).bits | uint32_t(from_compute<Half>(second).bits) << 16;
#endif
}
__device__ inline uint32_t from_compute(float first, float second, BFloat16) {
#if __CUDA_ARCH__ >= 800
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  return word;
#else
  return from_compute<BFloat16>(first).bits | uint32_t(from_compute<BFloat16>(second).bits) << 16;
#endif
}

// The type of an element in a kernel.
template <DType kDType> struct Element;
template <> struct Element<DType::kFloat64> {
  using type = double;
};
template <> struct Element<DType::kFloat32> {
  using type = float;
};
template <> struct Element<DType::kFloat16> {
  using type = Half;
};
template <> struct Element<DType::kBFloat16> {
  using type = BFloat16;
};
template <> struct Element<DType::kFloat8E4M3> {
  using type = Float8E4M3;
};
template <> struct Element<DType::kFloat8E5M2> {
  using type = Float8E5M2;
};
template <> struct Element<DType::kFloat8E8M0> {
  using type = Float8E8M0;
};
template <> struct Element<DType::kFloat4E2M1x2> {
  using type = Float4E2M1x2;
};
template <> struct Element<DType::kUInt8> {
  using type = uint8_t;
};
template <> struct Element<DType::kUInt16> {
  using type = uint16_t;
};
template <> struct Element<DType::kUInt32> {
  using type = uint32_t;
};
template <> struct Element<DType::kUInt64> {
  using type = uint64_t;
};
template <> struct Element<DType::kInt8> {
  using type = int8_t;
};
template <> struct Element<DType::kInt16> {
  using type = int16_t;
};
template <> struct Element<DType::kInt32> {
  using type = int32_t;
};
template <> struct Element<DType::kInt64> {
  using type = int64_t;
};
template <> struct Element<DType::kBool> {
  using type = bool;
};
template <> struct Element<DType::kComplex64> {
  using type = float2;
};
template <> struct Element<DType::kComplex128> {
  using type = double2;
};

// Returns `body(T{})` with the kernel's type of `dtype`, one of those listed.
template <DType... kListed, class Body>
cudaError_t visit(DType dtype, Body&& body) {
  cudaError_t status = cudaErrorInvalidValue;
  const auto found = [&](auto tag) {
    status = body(tag);
    return true;
  };
  (void)((dtype == kListed && found(typename Element<kListed>::type{})) || ...);
  return status;
}

// The same for the dtypes of kFloating.
template <class Body>
cudaError_t visit_floating(DType dtype, Body&& body) {
  return visit<DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16>(dtype, body);
}

}  // namespace cuda_ops
