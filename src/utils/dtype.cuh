// The floating element types on the device: how each is loaded, computed with
// and stored. The twin of dtype.h for the `.cu` side.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "dtype.h"

namespace cuda_ops {

// Arithmetic runs in float64 for float64 and in float32 for everything else.
// Every conversion is spelled out: torch's nvcc flags switch off the implicit
// ones of __half and __nv_bfloat16.
template <class T> struct Compute {
  using type = float;
};
template <> struct Compute<double> {
  using type = double;
};
template <class T> using compute_t = typename Compute<T>::type;

__device__ inline double to_compute(double value) { return value; }
__device__ inline float to_compute(float value) { return value; }
__device__ inline float to_compute(__half value) { return __half2float(value); }
__device__ inline float to_compute(__nv_bfloat16 value) { return __bfloat162float(value); }

template <class T> __device__ T from_compute(compute_t<T> value) { return value; }
template <> __device__ inline __half from_compute(float value) { return __float2half_rn(value); }
template <> __device__ inline __nv_bfloat16 from_compute(float value) {
  return __float2bfloat16_rn(value);
}

// Returns `body(T{})` with the device type of a floating dtype.
template <class Body>
cudaError_t visit_floating(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::kFloat64: return body(double{});
    case DType::kFloat32: return body(float{});
    case DType::kFloat16: return body(__half{});
    case DType::kBFloat16: return body(__nv_bfloat16{});
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace cuda_ops
