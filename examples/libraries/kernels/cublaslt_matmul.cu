// A product of row-major matrices by cuBLASLt, which thinks in columns: there a row-major matrix is
// its own transpose, so out^T = b^T a^T needs no flag.
#include <cublasLt.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "dtype.h"

using namespace cuda_ops;

namespace {

constexpr int kMostDevices = 64;

// A handle for the current device, made once and kept for the life of the process.
cublasStatus_t handle_of_device(cublasLtHandle_t& handle) {
  static std::mutex mutex;
  static cublasLtHandle_t handles[kMostDevices] = {};
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kMostDevices) {
    return CUBLAS_STATUS_NOT_INITIALIZED;
  }
  const std::lock_guard<std::mutex> guard(mutex);
  if (handles[device] == nullptr) {
    const cublasStatus_t status = cublasLtCreate(&handles[device]);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
  }
  handle = handles[device];
  return CUBLAS_STATUS_SUCCESS;
}

// Descriptions, destroyed together.
struct Descriptions {
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, out = nullptr;
  cublasLtMatmulPreference_t preference = nullptr;

  ~Descriptions() {
    if (preference != nullptr) cublasLtMatmulPreferenceDestroy(preference);
    for (cublasLtMatrixLayout_t layout : {a, b, out}) {
      if (layout != nullptr) cublasLtMatrixLayoutDestroy(layout);
    }
    if (operation != nullptr) cublasLtMatmulDescDestroy(operation);
  }
};

// One matrix behind the other.
cublasStatus_t describe(cublasLtMatrixLayout_t& layout, cudaDataType_t type, int64_t rows,
                        int64_t columns, int64_t batch) {
  const int32_t count = int32_t(batch);
  const int64_t step = rows * columns;
  cublasStatus_t status = cublasLtMatrixLayoutCreate(&layout, type, rows, columns, rows);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  status = cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count,
                                            sizeof(count));
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  return cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                          &step, sizeof(step));
}

// The algorithm may read and write as wide as these pointers allow, and no wider: a view may begin
// at any element.
cublasStatus_t allow(cublasLtMatmulPreference_t preference, const void* a, const void* b,
                     void* out) {
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t which, const void* pointer) {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    const uint32_t bytes = uint32_t(std::min<uintptr_t>(256, address & -address));
    return cublasLtMatmulPreferenceSetAttribute(preference, which, &bytes, sizeof(bytes));
  };
  for (const auto& [which, pointer] : {
           std::pair{CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, b},
           std::pair{CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, a},
           std::pair{CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, (const void*)(out)},
           std::pair{CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, (const void*)(out)},
       }) {
    if (const cublasStatus_t status = set(which, pointer); status != CUBLAS_STATUS_SUCCESS) {
      return status;
    }
  }
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t multiply(const void* a, const void* b, void* out, int64_t batch, int64_t m,
                        int64_t n, int64_t k, cudaDataType_t type, cudaStream_t stream) {
  cublasLtHandle_t handle = nullptr;
  Descriptions p;
  int found = 0;
  cublasLtMatmulHeuristicResult_t heuristic = {};
  cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
  const auto works = [&](cublasStatus_t result) {
    status = result;
    return result == CUBLAS_STATUS_SUCCESS;
  };
  if (!works(handle_of_device(handle)) ||
      !works(cublasLtMatmulDescCreate(&p.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F)) ||
      !works(describe(p.b, type, n, k, batch)) || !works(describe(p.a, type, k, m, batch)) ||
      !works(describe(p.out, type, n, m, batch)) ||
      !works(cublasLtMatmulPreferenceCreate(&p.preference)) ||
      !works(allow(p.preference, a, b, out)) ||
      !works(cublasLtMatmulAlgoGetHeuristic(handle, p.operation, p.b, p.a, p.out, p.out,
                                            p.preference, 1, &heuristic, &found))) {
    return status;
  }
  if (found == 0) return CUBLAS_STATUS_NOT_SUPPORTED;
  const float one = 1, zero = 0;
  return cublasLtMatmul(handle, p.operation, &one, b, p.b, a, p.a, &zero, out, p.out, out, p.out,
                        &heuristic.algo, nullptr, 0, stream);
}

}  // namespace

cudaError_t cublaslt_matmul_launch(const void* a, const void* b, void* out, int64_t batch,
                                   int64_t m, int64_t n, int64_t k, DType dtype,
                                   cudaStream_t stream) {
  if (batch == 0 || m == 0 || n == 0) return cudaSuccess;
  if (batch > INT32_MAX) return cudaErrorInvalidValue;
  if (k == 0) return cudaMemsetAsync(out, 0, size_t(batch * m * n * size_of(dtype)), stream);
  const cudaDataType_t type = dtype == DType::kFloat32   ? CUDA_R_32F
                              : dtype == DType::kFloat16 ? CUDA_R_16F
                                                         : CUDA_R_16BF;
  const cublasStatus_t status = multiply(a, b, out, batch, m, n, k, type, stream);
  return status == CUBLAS_STATUS_SUCCESS ? cudaSuccess : cudaErrorUnknown;
}
