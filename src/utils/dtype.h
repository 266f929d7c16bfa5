// The element types both sides of a pair know, as one plain enum: a binding
// fills it in, a kernel switches on it. No torch, no CUDA.
#pragma once

#include <cstdint>
#include <exception>

namespace cuda_ops {

enum class DType : int32_t {
  kFloat64,
  kFloat32,
  kFloat16,
  kBFloat16,
  kFloat8E4M3,
  kFloat8E5M2,
  kFloat8E8M0,    // a power of two, as scales of blocks are
  kFloat4E2M1x2,  // an element is two numbers in one byte
  kUInt8,
  kUInt16,
  kUInt32,
  kUInt64,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kBool,
  kComplex64,
  kComplex128,
  kUnsupported,  // a torch dtype without a C++ counterpart here
};

constexpr const char* name(DType dtype) {
  switch (dtype) {
    case DType::kFloat64: return "float64";
    case DType::kFloat32: return "float32";
    case DType::kFloat16: return "float16";
    case DType::kBFloat16: return "bfloat16";
    case DType::kFloat8E4M3: return "float8_e4m3fn";
    case DType::kFloat8E5M2: return "float8_e5m2";
    case DType::kFloat8E8M0: return "float8_e8m0fnu";
    case DType::kFloat4E2M1x2: return "float4_e2m1fn_x2";
    case DType::kUInt8: return "uint8";
    case DType::kUInt16: return "uint16";
    case DType::kUInt32: return "uint32";
    case DType::kUInt64: return "uint64";
    case DType::kInt8: return "int8";
    case DType::kInt16: return "int16";
    case DType::kInt32: return "int32";
    case DType::kInt64: return "int64";
    case DType::kBool: return "bool";
    case DType::kComplex64: return "complex64";
    case DType::kComplex128: return "complex128";
    case DType::kUnsupported: break;
  }
  return "a dtype cuda_ops does not know";
}

// Not std::invalid_argument: <stdexcept> would more than double what every kernel has to parse.
struct UnknownDType : std::exception {
  const char* what() const noexcept override {
    return "expected a dtype that kernels know (see DType), got another one";
  }
};

// Bytes per element.
constexpr int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kComplex128: return 16;
    case DType::kFloat64:
    case DType::kUInt64:
    case DType::kInt64:
    case DType::kComplex64: return 8;
    case DType::kFloat32:
    case DType::kUInt32:
    case DType::kInt32: return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kUInt16:
    case DType::kInt16: return 2;
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
    case DType::kFloat8E8M0:
    case DType::kFloat4E2M1x2:
    case DType::kUInt8:
    case DType::kInt8:
    case DType::kBool: return 1;
    case DType::kUnsupported: break;
  }
  throw UnknownDType();
}

// What a dtype is computed in: the twin of compute_t.
constexpr DType compute_dtype(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

}  // namespace cuda_ops
