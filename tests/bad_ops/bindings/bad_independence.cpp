// Gives all elements of a block the first of its words.
#include "bad.h"
#include "random_binding.h"

using namespace cuda_ops;

namespace {

constexpr DType kFloat64[] = {DType::kFloat64};

Tensor bad_independence_cpu(const Tensor& x, const Tensor& key) {
  const Random random(random_key(key));
  return detail::random_elementwise(
      [&](const auto& problem) {
        using T = double;
        for (int64_t i = 0; i < problem.numel; ++i) {
          const auto at = problem.offsets_at(i);
          const auto& operands = problem.operands;
          const double value = static_cast<const T*>(operands[1].data)[at[1]];
          static_cast<T*>(operands[0].data)[at[0]] = value + random.at(at[2] / 4 * 4).uniform();
        }
      },
      x);
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_independence(Tensor x, Tensor key) -> Tensor", "(),[2]->()")
      .dtypes(kFloat64)
      .random("key")
      .cpu<bad_independence_cpu>();
}
