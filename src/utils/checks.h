// What is checked before a kernel sees its arguments: one device, the dtypes
// that the binding listed, dims that fit the signature line, and ranges.
#pragma once

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "overlap.h"

namespace cuda_ops {
namespace detail {

// --- what the loader has read -------------------------------------------------
// Schema and signature line are parsed once, in Python. These structs hold the
// result; cuda_ops/dispatch/check_rules.py mirrors them and fills them in, texts
// for errors included, so that both languages refuse in the same words.

// "d", "2d" or "3" of a signature line: a size is factor * the size with this index.
struct DimRule {
  const char* text;
  int64_t factor;
  int64_t size;   // -1 for a plain number
  int64_t limit;  // limit_factor * the size may not exceed that of this index; -1: none
  int64_t limit_factor;
  const char* limit_text;
};

struct TensorRule {
  const char* name;
  int64_t dtypes;           // which list of Checks::dtypes; -1: any that DType has
  const char* dtypes_text;  // "float64, float32 or bfloat16"
  const DimRule* dims;      // the last dims of the tensor, or all of them
  int64_t dim_count;
  int64_t has_loops;  // whether there may be loop dims to the left
  int64_t is_written;
  const char* dims_text;  // "(..., m, k)"
};

struct Range {
  int64_t least, most;

  bool has(int64_t value) const { return value >= least && value <= most; }
  std::string listed(int64_t factor = 1) const {
    if (most == INT64_MAX) return "at least " + std::to_string(factor * least);
    return "from " + std::to_string(factor * least) + " to " + std::to_string(factor * most);
  }
};

struct IntRule {
  int64_t position;  // among all arguments
  Range range;
  int64_t limit;  // the size that it may not exceed; -1: none
  const char* limit_text;
};

struct FloatRule {
  int64_t position;  // among all arguments
  double least, most;
  const char* text;  // "from 0 to 1"
};

struct ScalarTypeRule {
  int64_t position;         // among all arguments
  int64_t dtypes;           // which list of Checks::dtypes
  const char* dtypes_text;  // "float32 or float16"
};

struct NameRule {
  int64_t position;  // among all arguments
  const char* const* names;
  int64_t count;
  const char* text;  // "'mean', 'sum' or 'none'"
};

struct Rules {
  const char* const* names;  // of all arguments
  const char* known_dtypes;  // what an argument without a list may have, in words
  const int64_t* written;    // for each argument, whether the operator writes it; null: none
  const TensorRule* tensors;
  int64_t tensor_count;
  const Range* sizes;  // of each named dim
  int64_t size_count;
  const IntRule* ints;
  int64_t int_count;
  const FloatRule* floats;
  int64_t float_count;
  const ScalarTypeRule* scalar_types;  // of those that have a list
  int64_t scalar_type_count;
  const NameRule* choices;  // of the str arguments that are one of several
  int64_t choice_count;
  int64_t has_line;  // whether the binding gave a signature line
};

// The most named dims of a signature line; the loader refuses more.
constexpr int64_t kMostNames = 32;

struct Checks {
  std::string op;         // with its namespace
  bool composed = false;  // of other operators: sizes may be symbolic
  bool expands = false;   // whether kernels get all tensors with the same loop dims
  // The lists of .dtypes(): the shared one first, then those of single arguments.
  std::vector<std::vector<DType>> dtypes{{}};
  const Rules* rules = nullptr;  // set by the loader before the first call

  // `tensors` holds the arguments that the schema calls Tensor or Tensor?, `ints` has an entry for
  // every argument. An argument that was not given is null.
  void run(const Tensor* const* tensors, const int64_t* const* ints) const {
    if (rules == nullptr) return;
    int64_t first = -1, sharing = -1;
    int64_t sizes[kMostNames];
    std::fill(sizes, sizes + rules->size_count, -1);
    for (int64_t i = 0; i < rules->tensor_count; ++i) {
      if (tensors[i] == nullptr) continue;
      const Tensor& tensor = *tensors[i];
      const TensorRule& rule = rules->tensors[i];
      if (!tensor.defined()) refuse(rule.name, "a tensor", "None");
      check_layout(tensor, rule.name);
      if (first < 0) {
        first = i;
      } else if (device_of(tensor) != device_of(*tensors[first])) {
        refuse(rule.name,
               "a tensor on " + name(device_of(*tensors[first])) + " like '" +
                   rules->tensors[first].name + "'",
               "one on " + name(device_of(tensor)));
      }
      if (rule.dtypes == 0 && sharing >= 0) {
        check_same_dtype(tensor, rule, *tensors[sharing], rules->tensors[sharing]);
      } else if (rule.dtypes >= 0) {
        check_dtype(tensor, rule);
        if (rule.dtypes == 0) sharing = i;
      } else if (!composed) {
        check_known(tensor, rule.name);
      }
      if (!composed) check_memory(tensor, rule.name);
      if (rule.dim_count > 0 || !rule.has_loops) check_dims(tensor, rule, sizes);
    }
    for (int64_t i = 0; i < rules->int_count; ++i) check_int(rules->ints[i], ints, sizes);
    if (rules->has_line && rules->tensor_count > 1) check_loop_dims(tensors);
  }

  // Expands the loop dims of the arguments that were given to those of all of them together, as
  // views with stride 0; `run` has seen that they broadcast.
  void expand(Tensor* const* tensors) const {
    if (rules == nullptr || loops_are_alike(tensors)) return;
    const auto loops = [&](int64_t i, const View& view) {
      return view.dims - static_cast<int>(rules->tensors[i].dim_count);
    };
    std::vector<int64_t> loop;
    for (int64_t i = 0; i < rules->tensor_count; ++i) {
      if (tensors[i] == nullptr || !rules->tensors[i].has_loops) continue;
      const View view = *tensors[i];
      cuda_ops::broadcast(loop, view, loops(i, view));
    }
    const auto rank = static_cast<int>(loop.size());
    for (int64_t i = 0; i < rules->tensor_count; ++i) {
      if (tensors[i] == nullptr || !rules->tensors[i].has_loops) continue;
      const View view = *tensors[i];
      const int own = loops(i, view), missing = rank - own;
      std::vector<int64_t> sizes = loop, strides(rank, 0);
      bool whole = missing == 0;
      for (int d = 0; d < own; ++d) {
        const bool same = view.size(d) == loop[missing + d];
        if (same) strides[missing + d] = view.strides[d];
        whole = whole && same;
      }
      if (whole) continue;
      for (int d = own; d < view.dims; ++d) {
        sizes.push_back(view.size(d));
        strides.push_back(view.strides[d]);
      }
      AtenTensorHandle expanded = nullptr;
      check_torch(
          aoti_torch__reinterpret_tensor(tensors[i]->get(), static_cast<int64_t>(sizes.size()),
                                         sizes.data(), strides.data(), 0, &expanded),
          "expand a tensor");
      *tensors[i] = Tensor(expanded);
    }
  }

  bool writes() const { return rules != nullptr && rules->written != nullptr && !composed; }

  struct Passed {
    Tensor* tensor;
    size_t position;  // among all arguments
  };

  // What is written shares memory with nothing else that is passed: a kernel would read what it has
  // just written. What is only read is copied, as Inductor passes one memory twice where a program
  // writes to a copy of what it reads; two that are written are refused.
  void separate(std::vector<Passed>& passed) const {
    std::vector<Extent> extents;
    for (const Passed& one : passed) extents.emplace_back(View(*one.tensor));
    const auto is_written = [&](size_t i) { return rules->written[passed[i].position]; };
    for (size_t i = 0; i < passed.size(); ++i) {
      if (!is_written(i) || extents[i].repeated == nullptr) continue;
      refuse(rules->names[passed[i].position],
             "a tensor whose elements share no memory, as the operator writes it",
             extents[i].repeated);
    }
    // By address, since lists may hold thousands: each is compared with those that begin within it.
    std::vector<size_t> order(passed.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::sort(order.begin(), order.end(),
              [&](size_t a, size_t b) { return extents[a].begin < extents[b].begin; });
    std::vector<bool> is_shared(passed.size());
    for (size_t a = 0; a < order.size(); ++a) {
      for (size_t b = a + 1; b < order.size(); ++b) {
        if (extents[order[b]].begin >= extents[order[a]].end) break;
        const size_t i = std::min(order[a], order[b]), j = std::max(order[a], order[b]);
        if (!is_written(i) && !is_written(j)) continue;
        if (!extents[i].shares_memory_with(extents[j])) continue;
        if (is_written(i) && is_written(j)) {
          refuse(rules->names[passed[i].position], "memory of its own, as the operator writes it",
                 std::string("some of '") + rules->names[passed[j].position] + "'");
        }
        is_shared[is_written(i) ? j : i] = true;
      }
    }
    for (size_t i = 0; i < passed.size(); ++i) {
      if (!is_shared[i]) continue;
      AtenTensorHandle copy = nullptr;
      check_torch(aoti_torch_clone_preserve_strides(passed[i].tensor->get(), &copy),
                  "copy a tensor that lies in memory that is written");
      *passed[i].tensor = Tensor(copy);
    }
  }

  // The float at this position among all arguments; NaN is in no range.
  void check_float(double value, size_t position) const {
    for (int64_t i = 0; rules != nullptr && i < rules->float_count; ++i) {
      const FloatRule& rule = rules->floats[i];
      if (rule.position != static_cast<int64_t>(position)) continue;
      if (value >= rule.least && value <= rule.most) continue;
      char text[32];
      std::snprintf(text, sizeof text, "%g", value);
      refuse(rules->names[position], rule.text, text);
    }
  }

  // The ScalarType at this position among all arguments.
  void check_scalar_type(ScalarType actual, size_t position) const {
    for (int64_t i = 0; rules != nullptr && i < rules->scalar_type_count; ++i) {
      const ScalarTypeRule& rule = rules->scalar_types[i];
      if (rule.position != static_cast<int64_t>(position)) continue;
      if (!is_listed(dtype_of(actual), rule.dtypes)) {
        refuse(rules->names[position], rule.dtypes_text, dtype_name(actual));
      }
    }
  }

  // The place of a str among the names that it may be; 0 if it may be anything.
  int64_t index_of(const std::string& actual, size_t position) const {
    for (int64_t i = 0; rules != nullptr && i < rules->choice_count; ++i) {
      const NameRule& rule = rules->choices[i];
      if (rule.position != static_cast<int64_t>(position)) continue;
      const char* const* const end = rule.names + rule.count;
      const char* const* const found = std::find(rule.names, end, actual);
      if (found != end) return found - rule.names;
      refuse(rules->names[position], rule.text, "'" + actual + "'");
    }
    return 0;
  }

  // One tensor of the Tensor[] at this position among all arguments; `first` is the first tensor of
  // the call.
  void check_listed(const Tensor& tensor, size_t position, const Tensor& first) const {
    if (rules == nullptr || composed) return;
    const char* const argument = rules->names[position];
    check_layout(tensor, argument);
    if (device_of(tensor) != device_of(first)) {
      refuse(argument, "tensors on " + name(device_of(first)) + " like the others",
             "one on " + name(device_of(tensor)));
    }
    check_known(tensor, argument);
    check_memory(tensor, argument);
  }

 private:
  void check_layout(const Tensor& tensor, const char* argument) const {
    if (!is_strided(tensor)) refuse(argument, "a strided tensor", "another layout");
    int64_t* unused = nullptr;  // a nested tensor calls itself strided, and has no sizes
    if (!composed && aoti_torch_get_sizes(tensor.get(), &unused) != TORCH_SUCCESS) {
      refuse(argument, "a strided tensor", "a nested one");
    }
  }

  bool is_listed(DType dtype, int64_t list) const {
    return std::find(dtypes[list].begin(), dtypes[list].end(), dtype) != dtypes[list].end();
  }

  void check_known(const Tensor& tensor, const char* argument) const {
    if (dtype_of(tensor) != DType::kUnsupported) return;
    refuse(argument, std::string("dtype ") + rules->known_dtypes, dtype_name(tensor));
  }

  // A tensor may have sizes and no memory: one that stands for others, as those of vmap and
  // functionalize do, or one whose storage was freed. cuda_ops/dispatch/fast_path.py takes
  // the dispatcher's way with the first kind. Or it has less memory than its sizes say, where its
  // storage was shrunk: a kernel would read past the end.
  static void check_memory(const Tensor& tensor, const char* argument) {
    const void* data = nullptr;
    if (torch_get_const_data_ptr(tensor.get(), &data) != TORCH_SUCCESS) {
      refuse(argument, "a tensor with memory", "one without a storage");
    }
    if (tensor.numel() == 0) return;
    int64_t offset = 0, bytes = 0;
    check_torch(aoti_torch_get_storage_offset(tensor.get(), &offset), "read an offset");
    const int64_t size = size_of(dtype_of(tensor));
    // That of a view of no memory is its offset.
    if (reinterpret_cast<uintptr_t>(data) == static_cast<uintptr_t>(offset * size)) {
      refuse(argument, "a tensor with memory", "one whose storage is empty");
    }
    const int64_t needed = (offset + last_of(tensor) + 1) * size;
    check_torch(aoti_torch_get_storage_size(tensor.get(), &bytes), "read the size of a storage");
    if (needed <= bytes) return;
    refuse(argument, "a storage of at least " + std::to_string(needed) + " bytes",
           "one of " + std::to_string(bytes));
  }

  // From the first element to the last.
  static int64_t last_of(const Tensor& tensor) {
    int64_t *sizes = nullptr, *strides = nullptr, last = 0;
    check_torch(aoti_torch_get_sizes(tensor.get(), &sizes), "read a shape");
    check_torch(aoti_torch_get_strides(tensor.get(), &strides), "read strides");
    const int64_t dims = tensor.dim();
    for (int64_t d = 0; d < dims; ++d) last += (sizes[d] - 1) * strides[d];
    return last;
  }

  static void check_same_dtype(const Tensor& tensor, const TensorRule& rule, const Tensor& other,
                               const TensorRule& other_rule) {
    if (dtype_of(tensor) == dtype_of(other)) return;
    refuse(rule.name, "dtype " + dtype_name(other) + " like '" + other_rule.name + "'",
           dtype_name(tensor));
  }

  void check_dtype(const Tensor& tensor, const TensorRule& rule) const {
    if (is_listed(dtype_of(tensor), rule.dtypes)) return;
    refuse(rule.name, std::string("dtype ") + rule.dtypes_text, dtype_name(tensor));
  }

  void check_dims(const Tensor& tensor, const TensorRule& rule, int64_t* sizes) const {
    const int64_t rank = tensor.dim(), count = rule.dim_count;
    if (rule.has_loops ? rank < count : rank != count) {
      refuse(rule.name,
             (rule.has_loops ? "at least " + std::to_string(count) : "exactly the") + " dims " +
                 rule.dims_text,
             "shape " + shape_name(tensor));
    }
    for (int64_t d = 0; d < count; ++d) {
      const DimRule& dim = rule.dims[d];
      const int64_t actual = tensor.size(rank - count + d);
      const auto refuse_size = [&](const std::string& expected) {
        refuse(rule.name,
               std::string("dim '") + dim.text + "' of " + rule.dims_text + " to be " + expected,
               "shape " + shape_name(tensor));
      };
      if (dim.size < 0 || sizes[dim.size] >= 0) {
        const int64_t expected = dim.size < 0 ? dim.factor : dim.factor * sizes[dim.size];
        if (actual != expected) refuse_size(std::to_string(expected));
        continue;
      }
      if (actual % dim.factor != 0) refuse_size("a multiple of " + std::to_string(dim.factor));
      const int64_t size = sizes[dim.size] = actual / dim.factor;
      const Range& range = rules->sizes[dim.size];
      if (!range.has(size)) refuse_size(range.listed(dim.factor));
      const int64_t limit = dim.limit < 0 ? -1 : sizes[dim.limit];
      if (limit >= 0 && dim.limit_factor * size > limit) {
        refuse_size("at most " + std::to_string(limit / dim.limit_factor * dim.factor) +
                    dim.limit_text);
      }
    }
  }

  void check_int(const IntRule& rule, const int64_t* const* ints, const int64_t* sizes) const {
    if (ints[rule.position] == nullptr) return;
    const int64_t value = *ints[rule.position];
    const char* const name = rules->names[rule.position];
    if (!rule.range.has(value)) refuse(name, rule.range.listed(), std::to_string(value));
    const int64_t most = rule.limit < 0 ? -1 : sizes[rule.limit];
    if (most >= 0 && value > most) {
      refuse(name, "at most " + std::to_string(most) + rule.limit_text, std::to_string(value));
    }
  }

  // Whether the dims to the left of the core dims are equal; finding out takes no memory.
  static bool alike(const Tensor& a, const Tensor& b, int64_t core_a, int64_t core_b) {
    const int64_t rank = a.dim() - core_a;
    if (b.dim() - core_b != rank) return false;
    for (int64_t d = 0; d < rank; ++d) {
      if (a.size(d) != b.size(d)) return false;
    }
    return true;
  }

  bool loops_are_alike(const Tensor* const* tensors) const {
    const TensorRule* const rule = rules->tensors;
    int64_t first = -1;
    for (int64_t i = 0; i < rules->tensor_count; ++i) {
      if (tensors[i] == nullptr || !rule[i].has_loops) continue;
      if (first < 0) first = i;
      if (!alike(*tensors[first], *tensors[i], rule[first].dim_count, rule[i].dim_count)) {
        return false;
      }
    }
    return true;
  }

  // The dims to the left of the core dims must broadcast.
  void check_loop_dims(const Tensor* const* tensors) const {
    if (loops_are_alike(tensors)) return;
    const TensorRule* const rule = rules->tensors;
    const int64_t count = rules->tensor_count;
    const auto has_loops = [&](int64_t i) { return tensors[i] != nullptr && rule[i].has_loops; };
    std::vector<int64_t> loop;
    for (int64_t i = 0; i < count; ++i) {
      if (!has_loops(i)) continue;
      const View view = *tensors[i];
      if (!broadcast(loop, view, view.dims - static_cast<int>(rule[i].dim_count))) {
        refuse(rule[i].name,
               std::string("dims '...' of ") + rule[i].dims_text + " to broadcast with " +
                   shape_name(loop),
               "shape " + shape_name(view));
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      if (!has_loops(i) || !rule[i].is_written) continue;
      const View view = *tensors[i];
      const int rank = view.dims - static_cast<int>(rule[i].dim_count);
      bool whole = rank == static_cast<int>(loop.size());
      for (int d = 0; whole && d < rank; ++d) whole = view.size(d) == loop[d];
      if (!whole) {
        refuse(rule[i].name,
               std::string("dims '...' of ") + rule[i].dims_text + " to be " + shape_name(loop) +
                   ", as the operator writes it",
               "shape " + shape_name(view));
      }
    }
  }
};

}  // namespace detail
}  // namespace cuda_ops
