// Class 6: counts the elements before a row of the table in 32 bits.
#include "raw.cuh"

using namespace cuda_ops;

namespace {

template <class T>
__global__ void rows_kernel(const T* table, const int64_t* index, int64_t rows, int columns, T* out,
                            int64_t numel) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= numel) return;
  const int64_t row = index[i / columns];
  const int at = static_cast<int>(row) * columns + static_cast<int>(i % columns);
  out[i] = row >= 0 && row < rows ? table[at] : T(0);
}

}  // namespace

cudaError_t bad_far_rows_launch(const Raw& problem, const int64_t* index, int64_t rows, int columns,
                                cudaStream_t stream) {
  if (problem.numel == 0) return cudaSuccess;
  return visit_raw(problem, [&](auto* table, auto* out) {
    rows_kernel<<<blocks_for(problem.numel), kThreads, 0, stream>>>(table, index, rows, columns,
                                                                    out, problem.numel);
  });
}
