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
  kUInt8,
  kUInt16,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kBool,
  kUnsupported,  // a torch dtype without a C++ counterpart here
};

constexpr const char* name(DType dtype) {
  switch (dtype) {
    case DType::kFloat64: return "float64";
    case DType::kFloat32: return "float32";
    case DType::kFloat16: return "float16";
    case DType::kBFloat16: return "bfloat16";
    case DType::kUInt8: return "uint8";
    case DType::kUInt16: return "uint16";
    case DType::kInt8: return "int8";
    case DType::kInt16: return "int16";
    case DType::kInt32: return "int32";
    case DType::kInt64: return "int64";
    case DType::kBool: return "bool";
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
    case DType::kFloat64:
    case DType::kInt64: return 8;
    case DType::kFloat32:
    case DType::kInt32: return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kUInt16:
    case DType::kInt16: return 2;
    case DType::kUInt8:
    case DType::kInt8:
    case DType::kBool: return 1;
    case DType::kUnsupported: break;
  }
  throw UnknownDType();
}

}  // namespace cuda_ops
