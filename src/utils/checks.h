// What is checked before a kernel sees its arguments: one device, the dtypes
// that the binding listed, and dims that fit the signature line.
#pragma once

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "tensor.h"

namespace cuda_ops {
namespace detail {

// "d", "2d" or "3" of a signature line: a size is factor * the size of `name`.
struct CoreDim {
  std::string text;
  int64_t factor = 1;
  std::string name;  // empty for a plain number

  explicit CoreDim(std::string written) : text(std::move(written)) {
    size_t digits = 0;
    while (digits < text.size() && text[digits] >= '0' && text[digits] <= '9') ++digits;
    // More digits, as all that is no signature line, are refused when this is loaded.
    if (digits > 0 && digits <= 18) factor = std::stoll(text.substr(0, digits));
    name = text.substr(digits);
  }
};

// "(m,k)" or "[n]" of a signature line: the last dims of a tensor, or all of them.
struct CoreDims {
  std::vector<CoreDim> dims;
  bool loops;  // whether there may be loop dims to the left

  std::string listed() const {
    std::string text = loops ? "(..." : "[";
    for (const CoreDim& dim : dims) text += (text.size() > 1 ? ", " : "") + dim.text;
    return text + (loops ? ")" : "]");
  }
};

// Built from the schema's argument names, the signature line and dtypes().
struct Checks {
  std::string op;
  std::vector<std::string> tensor_names;  // tensor arguments, in order
  std::vector<CoreDims> core_dims;        // per tensor argument; empty: no signature
  std::vector<DType> dtypes;              // empty: the binding checks on its own
  bool composed = false;                  // of other operators: sizes may be symbolic

  void run(const Tensor* const* tensors, size_t count) const {
    const Tensor* first = nullptr;
    size_t first_index = 0;
    std::array<std::pair<const std::string*, int64_t>, 16> bound;
    size_t bound_count = 0;
    for (size_t i = 0; i < count; ++i) {
      if (tensors[i] == nullptr) continue;  // optional, and not given
      const Tensor& tensor = *tensors[i];
      if (!tensor.defined()) refuse(op, tensor_names[i], "a tensor", "None");
      if (!is_strided(tensor)) refuse(op, tensor_names[i], "a strided tensor", "another layout");
      int64_t* sizes = nullptr;  // a nested tensor calls itself strided, and has none
      if (!composed && aoti_torch_get_sizes(tensor.get(), &sizes) != TORCH_SUCCESS) {
        refuse(op, tensor_names[i], "a strided tensor", "a nested one");
      }
      if (first == nullptr) {
        first = &tensor;
        first_index = i;
        if (!dtypes.empty()) check_dtype(tensor, i);
      } else {
        if (device_of(tensor) != device_of(*first)) {
          refuse(op, tensor_names[i],
                 "a tensor on " + name(device_of(*first)) + " like '" + tensor_names[first_index] +
                     "'",
                 "one on " + name(device_of(tensor)));
        }
        if (!dtypes.empty() && dtype_of(tensor) != dtype_of(*first)) {
          refuse(op, tensor_names[i],
                 "dtype " + dtype_name(*first) + " like '" + tensor_names[first_index] + "'",
                 dtype_name(tensor));
        }
      }
      if (i < core_dims.size() && !(core_dims[i].dims.empty() && core_dims[i].loops)) {
        check_dims(tensor, i, bound.data(), bound_count);
      }
    }
    if (count > 1 && core_dims.size() == count) check_loop_dims(tensors, count);
  }

 private:
  void check_dtype(const Tensor& tensor, size_t i) const {
    const DType actual = dtype_of(tensor);
    for (const DType dtype : dtypes) {
      if (dtype == actual) return;
    }
    std::string expected;
    for (size_t k = 0; k < dtypes.size(); ++k) {
      expected += std::string(k == 0                   ? ""
                              : k + 1 == dtypes.size() ? " or "
                                                       : ", ") +
                  cuda_ops::name(dtypes[k]);
    }
    refuse(op, tensor_names[i], "dtype " + expected, dtype_name(tensor));
  }

  void check_dims(const Tensor& tensor, size_t i, std::pair<const std::string*, int64_t>* bound,
                  size_t& bound_count) const {
    const auto& [dims, loops] = core_dims[i];
    const int64_t rank = tensor.dim();
    const auto count = static_cast<int64_t>(dims.size());
    if (loops ? rank < count : rank != count) {
      refuse(op, tensor_names[i],
             (loops ? "at least " + std::to_string(count) : "exactly the") + " dims " +
                 core_dims[i].listed(),
             "shape " + shape_name(tensor));
    }
    for (int64_t d = 0; d < count; ++d) {
      const CoreDim& dim = dims[d];
      const int64_t actual = tensor.size(rank - count + d);
      const auto refuse_size = [&](const std::string& expected) {
        refuse(op, tensor_names[i],
               "dim '" + dim.text + "' of " + core_dims[i].listed() + " to be " + expected,
               "shape " + shape_name(tensor));
      };
      int64_t expected = dim.name.empty() ? dim.factor : -1;
      for (size_t k = 0; k < bound_count; ++k) {
        if (*bound[k].first == dim.name) expected = dim.factor * bound[k].second;
      }
      if (expected >= 0) {
        if (actual != expected) refuse_size(std::to_string(expected));
      } else if (actual % dim.factor != 0) {
        refuse_size("a multiple of " + std::to_string(dim.factor));
      } else if (bound_count < 16) {
        bound[bound_count++] = {&dim.name, actual / dim.factor};
      }
    }
  }

  // Whether what is to the left of the core dims is alike, which takes no memory to find out.
  static bool alike(const Tensor& a, const Tensor& b, size_t core_a, size_t core_b) {
    const int64_t rank = a.dim() - static_cast<int64_t>(core_a);
    if (b.dim() - static_cast<int64_t>(core_b) != rank) return false;
    for (int64_t d = 0; d < rank; ++d) {
      if (a.size(d) != b.size(d)) return false;
    }
    return true;
  }

  // What is to the left of the core dims broadcasts.
  void check_loop_dims(const Tensor* const* tensors, size_t count) const {
    const auto has_loops = [&](size_t i) { return tensors[i] != nullptr && core_dims[i].loops; };
    size_t first = 0;
    while (first < count && !has_loops(first)) ++first;
    bool all = true;
    for (size_t i = first + 1; all && i < count; ++i) {
      all = !has_loops(i) || alike(*tensors[first], *tensors[i], core_dims[first].dims.size(),
                                   core_dims[i].dims.size());
    }
    if (all) return;
    std::vector<int64_t> loop;
    for (size_t i = first; i < count; ++i) {
      if (!has_loops(i)) continue;
      const View view = *tensors[i];
      if (!broadcast(loop, view, view.dims - static_cast<int>(core_dims[i].dims.size()))) {
        refuse(op, tensor_names[i],
               "dims '...' of " + core_dims[i].listed() + " to broadcast with " + shape_name(loop),
               "shape " + shape_name(view));
      }
    }
  }
};

}  // namespace detail
}  // namespace cuda_ops
