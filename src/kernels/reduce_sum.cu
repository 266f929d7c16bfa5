// The sum of all elements. A tensor that is dense in any order of its dims is one row. Other
// tensors are rows along one dim, whose sums are a row again. Either way x is read once, which
// takes all the time there is.
#include "reduce/reduce.cuh"

using namespace cuda_ops;

namespace {

// Returns `count` partial sums as a row of their own.
template <class C>
RowSums row_of(C* partials, int64_t count) {
  RowSums row;
  row.rows.data = partials;
  row.rows.dtype = sizeof(C) == 8 ? DType::kFloat64 : DType::kFloat32;
  row.n = count;
  return row;
}

template <class T>
cudaError_t launch_full_sum(const RowSums& p, cudaStream_t stream) {
  using C = compute_t<T>;
  RowSumsConfig config = row_sums_config(p, current_device());
  int64_t count = p.rows.numel * config.splits;
  if (count == 1) return launch_partial_sums<T>(p, config, nullptr, stream);
  C* partials = static_cast<C*>(p.partials);
  cudaError_t error = launch_partial_sums<T>(p, config, partials, stream);
  if (error == cudaSuccess && count > kMostFinished) {
    const RowSums again = row_of(partials, count);
    config = row_sums_config(again, current_device());
    partials += count;
    count = config.splits;
    error = launch_partial_sums<C>(again, config, partials, stream);
  }
  if (error != cudaSuccess) return error;
  return launch_finish(static_cast<T*>(p.out), partials, 1, count, stream);
}

}  // namespace

// -----------------------------------------------------------------------------

int64_t reduce_sum_partials(const RowSums& problem) {
  return full_partial_sums(problem, current_device());
}

cudaError_t reduce_sum_launch(const RowSums& problem, cudaStream_t stream) {
  return visit_floating(problem.rows.dtype,
                        [&](auto tag) { return launch_full_sum<decltype(tag)>(problem, stream); });
}
