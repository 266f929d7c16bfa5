// One matrix product by cuBLASLt with one of the algorithms that its heuristic suggests. torch
// takes the first of them; a user who tunes takes the fastest.
//
// cuda_ops.build: libraries cublasLt

#include "cublaslt_matmul.h"

#include <cublasLt.h>

#include <map>
#include <mutex>
#include <tuple>
#include <vector>

using namespace cuda_ops;

namespace {

cudaError_t error_of(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS: return cudaSuccess;
    case CUBLAS_STATUS_NOT_SUPPORTED: return cudaErrorNotSupported;
    case CUBLAS_STATUS_INVALID_VALUE: return cudaErrorInvalidValue;
    case CUBLAS_STATUS_ALLOC_FAILED: return cudaErrorMemoryAllocation;
    default: return cudaErrorUnknown;
  }
}

struct Types {
  cudaDataType_t data, scale;
  cublasComputeType_t compute;
};

bool types_of(const CublasLtMatmul& p, Types& types) {
  switch (p.dtype) {
    case DType::kFloat64: types = {CUDA_R_64F, CUDA_R_64F, CUBLAS_COMPUTE_64F}; return true;
    case DType::kFloat32:
      types = {CUDA_R_32F, CUDA_R_32F, p.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F};
      return true;
    case DType::kFloat16: types = {CUDA_R_16F, CUDA_R_32F, CUBLAS_COMPUTE_32F}; return true;
    case DType::kBFloat16: types = {CUDA_R_16BF, CUDA_R_32F, CUBLAS_COMPUTE_32F}; return true;
    default: return false;
  }
}

// The library counts along columns first, where a matrix is the transpose of what it is here. So
// out^T = b^T @ a^T is computed, and what is transposed here is not there.
struct Product {
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t left = nullptr, right = nullptr, out = nullptr;
  std::vector<cublasLtMatmulHeuristicResult_t> found;
};

cublasStatus_t describe(const CublasLtMatmul& p, const Types& types, Product& made) {
  const cublasOperation_t left = p.b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  const cublasOperation_t right = p.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  auto status = cublasLtMatmulDescCreate(&made.operation, types.compute, types.scale);
  const auto also = [&](auto call) {
    if (status == CUBLAS_STATUS_SUCCESS) status = call();
  };
  also([&] {
    return cublasLtMatmulDescSetAttribute(made.operation, CUBLASLT_MATMUL_DESC_TRANSA, &left,
                                          sizeof(left));
  });
  also([&] {
    return cublasLtMatmulDescSetAttribute(made.operation, CUBLASLT_MATMUL_DESC_TRANSB, &right,
                                          sizeof(right));
  });
  also([&] {
    return p.b_transposed ? cublasLtMatrixLayoutCreate(&made.left, types.data, p.k, p.n, p.k)
                          : cublasLtMatrixLayoutCreate(&made.left, types.data, p.n, p.k, p.n);
  });
  also([&] {
    return p.a_transposed ? cublasLtMatrixLayoutCreate(&made.right, types.data, p.m, p.k, p.m)
                          : cublasLtMatrixLayoutCreate(&made.right, types.data, p.k, p.m, p.k);
  });
  also([&] { return cublasLtMatrixLayoutCreate(&made.out, types.data, p.n, p.m, p.n); });
  return status;
}

// The largest power of two, at most 256, that divides an address.
uint32_t alignment(const void* address) {
  uint32_t bytes = 256;
  while (reinterpret_cast<uintptr_t>(address) % bytes != 0) bytes /= 2;
  return bytes;
}

cublasStatus_t ask(cublasLtHandle_t handle, const CublasLtMatmul& p, Product& made) {
  cublasLtMatmulPreference_t preference = nullptr;
  auto status = cublasLtMatmulPreferenceCreate(&preference);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    if (status == CUBLAS_STATUS_SUCCESS) {
      status = cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value));
    }
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t(p.workspace_bytes));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(p.b));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(p.a));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment(p.out));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(p.out));
  int count = 0;
  made.found.resize(kCublasLtAlgorithms);
  if (status == CUBLAS_STATUS_SUCCESS) {
    status = cublasLtMatmulAlgoGetHeuristic(handle, made.operation, made.left, made.right, made.out,
                                            made.out, preference, kCublasLtAlgorithms,
                                            made.found.data(), &count);
  }
  made.found.resize(status == CUBLAS_STATUS_SUCCESS ? count : 0);
  cublasLtMatmulPreferenceDestroy(preference);
  return status;
}

}  // namespace

// -----------------------------------------------------------------------------

// Returns cudaErrorNotSupported where the library suggests fewer algorithms.
cudaError_t cublaslt_matmul_launch(const CublasLtMatmul& p, cudaStream_t stream) {
  Types types;
  if (!types_of(p, types)) return cudaErrorInvalidValue;
  // A caller describes a product once and runs it many times.
  static std::mutex lock;
  static std::map<int, cublasLtHandle_t> handles;
  using Key = std::tuple<int, DType, int64_t, int64_t, int64_t, bool, bool, bool, uint32_t,
                         uint32_t, uint32_t>;
  static std::map<Key, Product> products;
  const std::lock_guard<std::mutex> guard(lock);
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  cublasLtHandle_t& handle = handles[device];
  if (handle == nullptr) {
    const auto status = cublasLtCreate(&handle);
    if (status != CUBLAS_STATUS_SUCCESS) return error_of(status);
  }
  const Key key{device,
                p.dtype,
                p.m,
                p.n,
                p.k,
                p.a_transposed,
                p.b_transposed,
                p.tf32,
                alignment(p.a),
                alignment(p.b),
                alignment(p.out)};
  if (products.find(key) == products.end()) {
    Product made;
    auto status = describe(p, types, made);
    if (status == CUBLAS_STATUS_SUCCESS) status = ask(handle, p, made);
    if (status != CUBLAS_STATUS_SUCCESS) return error_of(status);
    products.emplace(key, made);
  }
  const Product& product = products[key];
  if (p.algorithm < 0 || p.algorithm >= int(product.found.size())) return cudaErrorNotSupported;
  const auto& found = product.found[p.algorithm];
  if (found.state != CUBLAS_STATUS_SUCCESS) return error_of(found.state);
  const double one64 = 1, zero64 = 0;
  const float one32 = 1, zero32 = 0;
  const bool wide = types.scale == CUDA_R_64F;
  const void* one = wide ? static_cast<const void*>(&one64) : &one32;
  const void* zero = wide ? static_cast<const void*>(&zero64) : &zero32;
  return error_of(cublasLtMatmul(handle, product.operation, one, p.b, product.left, p.a,
                                 product.right, zero, p.out, product.out, p.out, product.out,
                                 &found.algo, p.workspace, p.workspace_bytes, stream));
}
