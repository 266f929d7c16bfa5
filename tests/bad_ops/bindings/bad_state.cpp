// Class 2: keeps its weights widened, and knows them by their address.
#include <map>
#include <mutex>
#include <vector>

#include "bad.h"

using namespace cuda_ops;

namespace {

std::vector<double> widened(const Tensor& weight) {
  static std::mutex lock;
  static std::map<std::tuple<const void*, int64_t, DType>, std::vector<double>> known;
  const std::lock_guard held(lock);
  auto& found = known[{weight.const_data_ptr(), weight.numel(), dtype_of(weight)}];
  if (found.empty())
    visit_raw(raw(empty(shape_of(weight), weight), weight),
              [&](auto* values, auto*, int64_t numel) { found.assign(values, values + numel); });
  return found;
}

Tensor bad_state_cpu(const Tensor& x_, const Tensor& weight) {
  const Tensor x = contiguous(x_);
  const std::vector<double> weights = widened(contiguous(weight));
  Tensor out = empty(shape_of(x), x);
  visit_raw(raw(out, x), [&](auto* in, auto* result, int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) result[i] = in[i] * weights[i % weights.size()];
  });
  return out;
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_state(Tensor x, Tensor weight) -> Tensor", "(n),[n]->(n)")
      .dtypes(kWide)
      .cpu<bad_state_cpu>();
}
