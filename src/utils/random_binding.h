// Random elementwise operators, the binding's side: the problem with the place of each element in
// its tensor, and the loop that the CPU runs. A binding whose operator is .random("key") includes
// it.
#pragma once

#include "elementwise.h"
#include "random.h"

namespace cuda_ops {

// The key that an argument with .random() holds, for the kernels of its device.
inline RandomKey random_key(const Tensor& key) {
  return {static_cast<const int64_t*>(key.const_data_ptr()), key.stride(0)};
}

namespace detail {

// Allocates the output and calls `run(problem, scalars...)`. The last input is the index: an
// operand of no memory whose address and strides count elements, dense and in the order of the
// dims.
template <class Run, class... Args>
Tensor random_elementwise(Run run, const Args&... args) {
  const auto scalars = std::tuple_cat(only<false>(args)...);
  return std::apply(
      [&](const Tensor& first, const auto&... rest) {
        const View inputs[] = {first, rest...};
        Tensor out = empty_elementwise(inputs, first);
        View index = writable_view(out);
        std::vector<int64_t> strides(index.dims);
        int64_t stride = 1;
        for (int d = index.dims - 1; d >= 0; --d) {
          strides[d] = stride;
          stride *= index.size(d);
        }
        index.data = nullptr;
        index.strides = strides.data();
        const auto problem = strided({writable_view(out)}, {View(first), View(rest)..., index});
        std::apply([&](const auto&... scalar) { run(problem, scalar...); }, scalars);
        return out;
      },
      std::tuple_cat(only<true>(args)...));
}

template <class T, int Inputs, int Outputs, class F, size_t... I>
void random_rows(const Strided<Inputs, Outputs>& problem, const Random& random, int64_t begin,
                 int64_t end, const F& f, std::index_sequence<I...>) {
  constexpr size_t kIndex = Outputs + Inputs - 1;
  const auto& operands = problem.operands;
  RandomBlock block{};
  uint64_t made = ~uint64_t(0);  // which block it is
  for_each_row(problem, begin, end, [&](const auto& first, int64_t count) {
    const auto at = [&](size_t k, int64_t i) { return first[k] + i * operands[k].strides[0]; };
    for (int64_t i = 0; i < count; ++i) {
      const uint64_t index = uint64_t(at(kIndex, i));
      if (index / 4 != made) block = random.block(made = index / 4);
      const auto value = [&](size_t k) {
        return static_cast<double>(static_cast<const T*>(operands[k].data)[at(k, i)]);
      };
      static_cast<T*>(operands[0].data)[at(0, i)] =
          static_cast<T>(f(Random::draw(block, uint32_t(index)), value(Outputs + I)...));
    }
  });
}

}  // namespace detail

// The whole CPU entry of a random elementwise operator: `f(draw, values..., scalars...)`. `args`
// are the operator's without the key: tensors, and scalars to pass on.
template <class F, class... Args>
Tensor random_cpu(F f, const Tensor& key, const Args&... args) {
  const Random random(random_key(key));
  constexpr int64_t kGrain = 4096;
  return detail::random_elementwise(
      [&](const auto& problem, const auto&... scalars) {
        const auto each = [&](const Draw& draw, auto... values) {
          return f(draw, values..., scalars...);
        };
        visit_floating_cpu(problem.dtype, [&](auto tag) {
          using T = decltype(tag);
          parallel_for(problem.numel, kGrain, [&](int64_t begin, int64_t end) {
            constexpr int kRead = std::decay_t<decltype(problem)>::kOperands - 2;
            detail::random_rows<T>(problem, random, begin, end, each,
                                   std::make_index_sequence<kRead>{});
          });
        });
      },
      args...);
}

// The whole CUDA entry: `launcher(problem, key, scalars..., stream)`.
template <class Launcher, class... Args>
Tensor random_cuda(Launcher launcher, const Tensor& key, const Args&... args) {
  return detail::random_elementwise(
      [&](const auto& problem, const auto&... scalars) {
        launch(key, [&](cudaStream_t stream) {
          return launcher(problem, random_key(key), scalars..., stream);
        });
      },
      args...);
}

}  // namespace cuda_ops
