// Epilogues: the last step of a sum on its way to memory, the same for every family of matrix
// product kernels. An epilogue sees two neighbors of a row of out:
//
//   struct Epilogue {
//     static constexpr bool kSecond = false;  // whether there is a second output
//     // Reads the inputs of columns n and n + 1 of any row; `count` of them are inside the
//     // matrix. A kernel may call it long before it has the sums.
//     struct Columns {};
//     __device__ Columns columns(int64_t n, int count) const;
//     // Reads the inputs of one place. Kernels call it for many places before they use any, so
//     // that all loads are on their way. Where needs_place() is false they pass the columns alone.
//     struct Inputs {};
//     __device__ bool needs_place() const;
//     __device__ Inputs inputs(const Columns&) const;
//     __device__ Inputs inputs(const Columns&, const Place&) const;
//     // Changes the sums in place; the values left in `aside` go to the second output. Without a
//     // branch, the compiler computes several places at a time.
//     template <class C>
//     __device__ void operator()(C (&sums)[2], C (&aside)[2], const Inputs&) const;
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
  struct Columns {};
  struct Inputs {};
  __device__ Columns columns(int64_t, int) const { return {}; }
  __device__ bool needs_place() const { return false; }
  __device__ Inputs inputs(const Columns&) const { return {}; }
  __device__ Inputs inputs(const Columns&, const Place&) const { return {}; }
  template <class C>
  __device__ void operator()(C (&)[2], C (&)[2], const Inputs&) const {}
};

// Two neighbors of a row as they are in memory. 16-bit ones stay one word: the compiler would take
// halves apart and put them together.
template <class T>
struct alignas(2 * sizeof(T)) Pair {
  static constexpr bool kWord = sizeof(T) == 2;
  struct Values {
    T first, second;
  };
  std::conditional_t<kWord, uint32_t, Values> values;

  // Gives zeros for those outside; one load where both are inside and aligned.
  __device__ static Pair load(const T* at, bool first, bool second) {
    if (second && reinterpret_cast<uintptr_t>(at) % sizeof(Pair) == 0) {
      return *reinterpret_cast<const Pair*>(at);
    }
    const T one = first ? at[0] : T{}, other = second ? at[1] : T{};
    if constexpr (kWord) {
      return {one.bits | uint32_t(other.bits) << 16};
    } else {
      return {{one, other}};
    }
  }

  template <class C>
  __device__ void widen(C (&both)[2]) const {
    if constexpr (kWord) {
      to_compute(values, T{}, both);
    } else {
      both[0] = to_compute(values.first);
      both[1] = to_compute(values.second);
    }
  }
};

// The type of float sums that are kept as they are.
__device__ inline float2 from_compute(float first, float second, float) { return {first, second}; }

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

// Stores both outputs of a pair of sums.
template <class Out, class Epilogue, class C>
__device__ void finish_pair(const Epilogue& epilogue, C (&sums)[2], const Place& at, void* out,
                            void* second) {
  if (!at.first) return;
  C aside[2];
  epilogue(sums, aside, epilogue.inputs(epilogue.columns(at.n, at.second ? 2 : 1), at));
  store_pair<Out>(out, at, sums);
  if constexpr (Epilogue::kSecond) store_pair<Out>(second, at, aside);
}

// Reads the inputs of four neighbors of a row; `left` of them are inside.
template <class Epilogue, class Inputs>
__device__ void load_inputs(const Epilogue& epilogue, const Place& at, int64_t left,
                            Inputs (&inputs)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Place place{at.offset + 2 * i, at.m, at.n + 2 * i, at.first && 2 * i < left,
                      at.first && 2 * i + 1 < left};
    const int count = int(place.first) + int(place.second);
    inputs[i] = epilogue.inputs(epilogue.columns(place.n, count), place);
  }
}

// Stores both outputs of four neighbors: one store each if they are `aligned`.
template <class Out, class Epilogue, class Inputs>
__device__ void finish_quad(const Epilogue& epilogue, float (&sums)[4], const Inputs (&inputs)[2],
                            const Place& at, int64_t left, bool aligned, void* out, void* second) {
  struct alignas(4 * sizeof(Out)) Quad {
    decltype(from_compute(0.f, 0.f, Out{})) pairs[2];
  };
  float asides[4];
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    float pair[2] = {sums[i], sums[i + 1]}, aside[2];
    epilogue(pair, aside, inputs[i / 2]);
    sums[i] = pair[0], sums[i + 1] = pair[1];
    if constexpr (Epilogue::kSecond) asides[i] = aside[0], asides[i + 1] = aside[1];
  }
  const auto store = [&](void* to, const float (&values)[4]) {
    Out* const pointer = static_cast<Out*>(to) + at.offset;
    if (aligned && left >= 4) {
      *reinterpret_cast<Quad*>(pointer) = {from_compute(values[0], values[1], Out{}),
                                           from_compute(values[2], values[3], Out{})};
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < left) pointer[i] = from_compute<Out>(values[i]);
    }
  };
  store(out, sums);
  if constexpr (Epilogue::kSecond) store(second, asides);
}

}  // namespace cuda_ops
