// Random elementwise operators, the kernel's side: out[i] = f(draw of i, in[i]...), where i is the
// place of the element in its tensor, whatever the strides.
#pragma once

#include "elementwise.cuh"
#include "random.h"

namespace cuda_ops {
namespace detail {

template <class F>
struct Randomized {
  static constexpr bool kIndexed = true;
  F f;
  RandomKey key;

  // A pack starts at a multiple of its size, so packs of four elements and more are whole blocks.
  template <class T, int kBytes, int Inputs, int Outputs>
  __device__ void apply(uint64_t index, const Pack<T, kBytes> (&in)[Inputs],
                        Pack<T, kBytes> (&out)[Outputs]) const {
    constexpr int kSize = Pack<T, kBytes>::kSize;
    const Random random(key);
    RandomBlock blocks[(kSize + 3) / 4];
#pragma unroll
    for (int b = 0; b < int(sizeof(blocks) / sizeof(RandomBlock)); ++b) {
      blocks[b] = random.block(index / 4 + b);
    }
    uint32_t v = 0;
    const auto next = [&](auto... values) {
      const Draw draw = Random::draw(blocks[v / 4], kSize < 4 ? uint32_t(index) + v : v);
      ++v;
      return f(draw, values...);
    };
    cuda_ops::apply(next, in, out);
  }
};

}  // namespace detail

// `problem` and `key` as random_cuda of random_binding.h makes them; `f` takes a Draw and compute
// types, and returns one or Results of them.
template <int Inputs, int Outputs, class F>
cudaError_t map_random_cuda(const Strided<Inputs, Outputs>& problem, RandomKey key,
                            cudaStream_t stream, F f) {
  return detail::map_cuda(problem, stream, [&](auto) { return detail::Randomized<F>{f, key}; });
}

}  // namespace cuda_ops
