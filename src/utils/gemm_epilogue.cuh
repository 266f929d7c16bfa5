// What happens to a sum on its way to memory, the same for every family of
// matrix product kernels. An epilogue sees two neighbours of a row of out:
//
//   struct Epilogue {
//     static constexpr bool kSecond = false;  // whether there is a second output
//     // Changes the sums in place; what it leaves in `aside` goes to the second output.
//     template <class C>
//     __device__ void operator()(C (&sums)[2], C (&aside)[2], const Place& at) const;
//   };
#pragma once

#include <type_traits>

#include "dtype.cuh"

namespace cuda_ops {

// Columns n and n + 1 of row m.
struct Place {
  int64_t offset;  // of the first, in elements from the start of out
  int64_t m, n;
  bool first, second;  // inside of the matrix
};

struct PlainEpilogue {
  static constexpr bool kSecond = false;
  template <class C>
  __device__ void operator()(C (&)[2], C (&)[2], const Place&) const {}
};

// The type of float sums that are kept as they are.
__device__ inline uint64_t from_compute(float first, float second, float) {
  return uint64_t(__float_as_uint(second)) << 32 | __float_as_uint(first);
}

// One store where the pair is aligned, two where it is not or crosses the border.
template <class Out, class C>
__device__ void store_pair(void* out, const Place& at, const C (&sums)[2]) {
  Out* pointer = static_cast<Out*>(out) + at.offset;
  if constexpr (sizeof(Out) <= 4) {
    if (at.second && reinterpret_cast<uintptr_t>(pointer) % (2 * sizeof(Out)) == 0) {
      const auto word = from_compute(sums[0], sums[1], Out{});
      *reinterpret_cast<std::remove_const_t<decltype(word)>*>(pointer) = word;
      return;
    }
  }
  if (at.first) pointer[0] = from_compute<Out>(sums[0]);
  if (at.second) pointer[1] = from_compute<Out>(sums[1]);
}

// Both outputs of a pair of sums.
template <class Out, class Epilogue, class C>
__device__ void finish_pair(const Epilogue& epilogue, C (&sums)[2], const Place& at, void* out,
                            void* second) {
  if (!at.first) return;
  C aside[2];
  epilogue(sums, aside, at);
  store_pair<Out>(out, at, sums);
  if constexpr (Epilogue::kSecond) store_pair<Out>(second, at, aside);
}

}  // namespace cuda_ops
