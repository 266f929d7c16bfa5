// The plain description of an elementwise problem: what a binding hands to an
// elementwise kernel, CPU or CUDA. No torch, no CUDA.
#pragma once

#include <array>
#include <cstdint>
#include <utility>

#include "dtype.h"
#include "layout.h"

namespace cuda_ops {

// The return value of a function with several outputs.
template <class T, int Outputs>
struct Results {
  T values[Outputs];
};

// How many outputs a return value is for.
template <class Returned>
constexpr int kResultsIn = 1;
template <class T, int Outputs>
constexpr int kResultsIn<Results<T, Outputs>> = Outputs;

// One operand: where it starts and how many elements to step per dim. A
// broadcast dim has stride 0.
struct Operand {
  void* data = nullptr;
  std::array<int64_t, kMaxDims> strides{};
};

// (out_0[i], ...) = f(in_0[i], ...) over `numel` points of one dtype. The first
// `Outputs` operands are written, the rest are read. After coalesce() dims run
// from the fastest to the slowest in the output and are merged wherever the
// memory of every operand allows it, so a dense problem always arrives as one dim.
template <int Inputs, int Outputs = 1>
struct Strided {
  static constexpr int kOperands = Outputs + Inputs;
  DType dtype = DType::kUnsupported;
  int64_t numel = 0;
  int dims = 0;
  std::array<int64_t, kMaxDims> sizes{};
  std::array<Operand, kOperands> operands{};

  const Operand& input(int k) const { return operands[Outputs + k]; }

  // All operands dense in the same order: the index is the offset.
  bool is_flat() const {
    if (dims > 1) return false;
    for (const Operand& operand : operands) {
      if (dims == 1 && operand.strides[0] != 1) return false;
    }
    return true;
  }

  // Where point `index` lies in every operand, in elements. constexpr, so that
  // kernels can call it too.
  constexpr std::array<int64_t, kOperands> offsets_at(int64_t index) const {
    std::array<int64_t, kOperands> offsets{};
    for (int d = 0; d < dims; ++d) {
      const int64_t i = index % sizes[d];
      index /= sizes[d];
      for (int k = 0; k < kOperands; ++k) offsets[k] += i * operands[k].strides[d];
    }
    return offsets;
  }

  // Every index and every offset is at most `limit`.
  bool fits(int64_t limit) const {
    if (numel > limit) return false;
    for (const Operand& operand : operands) {
      int64_t last = 0;
      for (int d = 0; d < dims; ++d) last += (sizes[d] - 1) * operand.strides[d];
      if (last > limit) return false;
    }
    return true;
  }

  // Keeps the lower half of the dim that reaches furthest, returns the upper.
  Strided split() {
    int dim = 0;
    int64_t furthest = -1;
    for (int d = 0; d < dims; ++d) {
      int64_t reach = 0;
      for (const Operand& operand : operands) reach += (sizes[d] - 1) * operand.strides[d];
      if (reach > furthest) {
        dim = d;
        furthest = reach;
      }
    }
    Strided upper = *this;
    const int64_t half = sizes[dim] / 2;
    const int64_t others = numel / sizes[dim];
    upper.sizes[dim] -= half;
    upper.numel = others * upper.sizes[dim];
    for (Operand& operand : upper.operands) {
      const int64_t bytes = half * operand.strides[dim] * size_of(dtype);
      operand.data = static_cast<char*>(operand.data) + bytes;
    }
    sizes[dim] = half;
    numel = others * half;
    return upper;
  }

  // Leaves dim d, and the points along it, to the caller.
  void drop_dim(int d) {
    numel = 1;
    for (int other = 0; other < dims; ++other) numel *= other == d ? 1 : sizes[other];
    for (int next = d + 1; next < dims; ++next) copy_dim(next, next - 1);
    --dims;
  }

  void coalesce() {
    for (int i = 1; i < dims; ++i) {
      for (int j = i; j > 0 && is_faster(j, j - 1); --j) swap_dims(j, j - 1);
    }
    int kept = 0;
    for (int i = 0; i < dims; ++i) {
      if (sizes[i] == 1) continue;
      if (kept > 0 && is_mergeable(kept - 1, i)) {
        sizes[kept - 1] *= sizes[i];
      } else {
        copy_dim(i, kept++);
      }
    }
    dims = kept;
  }

 private:
  bool is_faster(int a, int b) const {
    for (const Operand& operand : operands) {
      if (operand.strides[a] != operand.strides[b]) {
        return operand.strides[a] < operand.strides[b];
      }
    }
    return false;
  }

  // Walking `upper` continues where walking `lower` to its end left off.
  bool is_mergeable(int lower, int upper) const {
    for (const Operand& operand : operands) {
      if (operand.strides[upper] != operand.strides[lower] * sizes[lower]) return false;
    }
    return true;
  }

  void copy_dim(int from, int to) {
    sizes[to] = sizes[from];
    for (Operand& operand : operands) operand.strides[to] = operand.strides[from];
  }

  void swap_dims(int a, int b) {
    std::swap(sizes[a], sizes[b]);
    for (Operand& operand : operands) std::swap(operand.strides[a], operand.strides[b]);
  }
};

}  // namespace cuda_ops
