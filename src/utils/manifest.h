// The declarations of a binding. `CUDA_OPS(library) { ... }` lists operators:
//
//   CUDA_OPS(library) {
//     library.op("silu(Tensor x) -> Tensor", "()->()")
//         .dtypes(kFloating)
//         .cpu<silu_cpu>()
//         .cuda<silu_cuda>();
//   }
//
// They belong to the namespace `cuda_ops` of the dispatcher, those of `CUDA_OPS(my_ops, library)`
// to `my_ops`.
//
// The library exports that list as JSON; nothing registers itself when it is
// opened. The loader reads the list, compares the C++ types with the schema,
// hands back what to check at each call, and only then asks for registration.
#pragma once

#include <cmath>
#include <cstdio>
#include <deque>
#include <type_traits>

#include "entry.h"
#include "launch.h"

#ifndef CUDA_OPS_SOURCE_HASH
#define CUDA_OPS_SOURCE_HASH ""
#endif

namespace cuda_ops {

class Op {
 public:
  Op(const std::string& space, std::string schema, std::string signature)
      : schema_(std::move(schema)), signature_(std::move(signature)) {
    checks_.op = space + "::" + schema_.substr(0, schema_.find('('));
  }

  // Every tensor argument that has no list of its own has one of these dtypes, all the same one.
  template <size_t N>
  Op& dtypes(const DType (&allowed)[N]) {
    checks_.dtypes[0].assign(allowed, allowed + N);
    return *this;
  }

  // This tensor has one of these, whatever the others have; or a ScalarType is one of these.
  template <size_t N>
  Op& dtypes(const char* argument, const DType (&allowed)[N]) {
    own_dtypes_.push_back(argument);
    checks_.dtypes.emplace_back(allowed, allowed + N);
    return *this;
  }

  Op& dtypes(const char* argument, DType only) {
    const DType allowed[] = {only};
    return dtypes(argument, allowed);
  }

  // An int argument, or the size of a dim that the signature line names, is from `least` to `most`,
  // both included. Or a float argument, where they are written as such: .range("p", 0.0, 1.0).
  template <class Least, class Most>
  Op& range(const char* name, Least least, Most most) {
    if constexpr (std::is_floating_point_v<Least> || std::is_floating_point_v<Most>) {
      float_ranges_.push_back({name, double(least), double(most)});
    } else {
      ranges_.push_back({name, {int64_t(least), int64_t(most)}});
    }
    return *this;
  }

  // The same without an upper limit: .at_least("n", 1), or .at_least("eps", 0.0) for a float.
  template <class Least>
  Op& at_least(const char* name, Least least) {
    if constexpr (std::is_floating_point_v<Least>) {
      return range(name, least, INFINITY);
    } else {
      return range(name, least, INT64_MAX);
    }
  }

  // A float argument is greater than this number.
  Op& above(const char* argument, double number) {
    float_ranges_.push_back({argument, number, INFINITY, true});
    return *this;
  }

  // A str argument is one of these. The C++ function may take an enum, whose values number them.
  Op& one_of(const char* argument, std::initializer_list<const char*> names) {
    choices_.push_back({argument, names});
    return *this;
  }

  // An int argument, or the size of a dim that the signature line names or a multiple of it ("2r"),
  // is at most the size of a dim of an argument before.
  Op& at_most(const char* name, const char* dim) {
    limits_.push_back({name, dim});
    return *this;
  }

  // The numbers in this tensor of integers are indices: from 0 to below the size of a dim that the
  // signature line names. Tests and benchmarks draw such ones; calls are not checked.
  Op& below(const char* argument, const char* dim) {
    belows_.push_back({argument, dim});
    return *this;
  }

  // This output has a dtype of its own, not the first tensor's.
  Op& returns(const char* output, DType dtype) {
    results_.push_back({output, "", dtype});
    return *this;
  }

  // This output has the dtype that a ScalarType argument says, or a tensor argument has; where that
  // one is None, `otherwise` or, without it, the first tensor's.
  Op& returns(const char* output, const char* argument, DType otherwise = DType::kUnsupported) {
    results_.push_back({output, argument, otherwise});
    return *this;
  }

  // This output is there for <op>_backward, and has no gradient of its own.
  Op& saved(const char* output) {
    saved_.push_back(output);
    return *this;
  }

  // The same, and `cuda_ops.<op>` does not return it. Results that it returns come first.
  Op& hidden(const char* output) {
    hidden_.push_back(output);
    return saved(output);
  }

  // This tensor argument has no gradient by design; asking for one is refused in these words. Or
  // this output has none: to autograd it is a constant, as an integer would be.
  Op& no_gradient(const char* name) {
    no_gradient_.push_back(name);
    return *this;
  }

  // The operator is linear in this tensor while the other arguments stay as they are: in forward
  // mode the tangent takes its place.
  Op& linear(const char* argument) {
    linear_.push_back(argument);
    return *this;
  }

  // What torch.compile and CUDA graphs may assume, by the name that torch.Tag has for it.
  Op& tag(const char* name) {
    tags_.push_back(name);
    return *this;
  }

  // The same arguments may give other bits, everywhere or on "cpu" or "cuda" alone:
  // torch.use_deterministic_algorithms refuses a call.
  Op& nondeterministic(const char* device = "") {
    nondeterministic_.push_back(device);
    return *this;
  }

  // The kernels get all tensors with the loop dims of the result: views with stride 0.
  Op& broadcast() {
    checks_.expands = true;
    return *this;
  }

  // This tensor holds a random key, two numbers that random.h reads: results depend on the place of
  // an element, and the public function draws the key unless the caller gives one.
  Op& random(const char* argument) {
    random_ = argument;
    return dtypes(argument, DType::kInt64);
  }

  // The docstring of the public Python function.
  Op& doc(const char* text) {
    doc_ = text;
    return *this;
  }

  // An operator of cuda_ops that this one calls, here or in its gradients. One of another pair is
  // loaded before it, and built before it is compared with its reference.
  Op& calls(const char* op) {
    calls_.push_back(op);
    return *this;
  }

  // `ByTorch`, of the same type, does the same by torch's own operators, at their speed: a CPU runs
  // it unless CUDA_OPS_CPU=own. Function is what the operator is proven by all the same.
  template <auto Function, auto ByTorch = nullptr>
  Op& cpu() {
    kernel<Function>("CPU");
    if constexpr (!std::is_null_pointer_v<decltype(ByTorch)>) {
      static_assert(std::is_same_v<decltype(Function), decltype(ByTorch)>,
                    ".cpu<f, g>: g takes and returns what f does");
      using E = detail::Entry<ByTorch>;
      E::checks = &checks_;
      kernels_.back().by_torch = &E::call;
    }
    return *this;
  }

  template <auto Function>
  Op& cuda() {
    has_cuda_ = true;
#if CUDA_OPS_CUDA
    kernel<Function>("CUDA");
#endif
    return *this;
  }

  // Composed of other operators: one function for every device, differentiable
  // and traceable through what it calls.
  template <auto Function>
  Op& composite() {
    checks_.composed = true;
    return kernel<Function>("CompositeImplicitAutograd");
  }

 private:
  friend class Library;

  template <auto Function>
  Op& kernel(const char* key) {
    using E = detail::Entry<Function>;
    E::checks = &checks_;
    kernels_.push_back(describe<E>(key, Function));
    return *this;
  }

  template <class E, class R, class... Args>
  static detail::Kernel describe(const char* key, R (*)(Args...)) {
    detail::Kernel kernel{key,
                          detail::schema_types<typename E::template Value<Args>...>(),
                          {},
                          &E::call,
                          &E::trampoline,
                          &E::slot,
                          nullptr};
    if constexpr (!std::is_void_v<R>) kernel.returns = detail::Returns<R>::types();
    return kernel;
  }

  std::string schema_, signature_, doc_, random_;
  detail::Checks checks_;
  std::vector<const char*> own_dtypes_;  // the arguments of checks_.dtypes from the second list on
  std::vector<std::pair<const char*, detail::Range>> ranges_;
  struct FloatRange {
    const char* name;
    double least, most;
    bool is_open = false;  // `least` is not included
  };
  std::vector<FloatRange> float_ranges_;
  std::vector<std::pair<const char*, const char*>> limits_, belows_;
  std::vector<std::pair<const char*, std::vector<const char*>>> choices_;
  struct Result {
    const char *output, *like;
    DType dtype;
  };
  std::vector<Result> results_;
  std::vector<const char*> saved_, calls_;
  std::vector<const char*> hidden_, no_gradient_, linear_, tags_, nondeterministic_;
  std::vector<detail::Kernel> kernels_;
  bool has_cuda_ = false;
};

class Library {
 public:
  explicit Library(const char* space) : space_(space) {}

  // `schema` without a namespace; `signature` in NumPy's generalized-ufunc
  // form, one group per tensor argument and per output, or "" for none.
  Op& op(const char* schema, const char* signature) {
    return ops_.emplace_back(space_, schema, signature);
  }

  // Strings only: a stream would drag in the locale machinery, which crashes in a
  // process that holds two copies of libstdc++ (a toolchain that links it statically).
  std::string json() const {
    std::string out = "{\"format\":7,\"namespace\":" + quoted(space_) +
                      ",\"archs\":" + quoted(CUDA_OPS_ARCHS) +
                      ",\"source_hash\":" + quoted(CUDA_OPS_SOURCE_HASH) + ",\"ops\":[";
    for (const Op& op : ops_) {
      if (&op != &ops_.front()) out += ',';
      out += "{\"schema\":" + quoted(op.schema_) + ",\"signature\":" + quoted(op.signature_) +
             ",\"doc\":" + quoted(op.doc_) + ",\"has_cuda\":" + (op.has_cuda_ ? "true" : "false") +
             ",\"checks\":" + address(&op.checks_) + ",\"dtypes\":" + dtypes(op.checks_.dtypes[0]) +
             ",\"dtypes_of\":[";
      for (size_t i = 0; i < op.own_dtypes_.size(); ++i) {
        out += (i ? ",[" : "[") + quoted(op.own_dtypes_[i]) + ',' +
               dtypes(op.checks_.dtypes[i + 1]) + ']';
      }
      out += "],\"ranges\":[";
      for (const auto& [name, range] : op.ranges_) {
        out += (out.back() == '[' ? "[" : ",[") + quoted(name) + ',' + std::to_string(range.least) +
               ',' + std::to_string(range.most) + ']';
      }
      out += "],\"choices\":[";
      for (const auto& [argument, names] : op.choices_) {
        out += (out.back() == '[' ? "[" : ",[") + quoted(argument) + ',' + list(names) + ']';
      }
      out += "],\"float_ranges\":[";
      for (const auto& [name, least, most, is_open] : op.float_ranges_) {
        out += (out.back() == '[' ? "[" : ",[") + quoted(name) + ',' + digits(least) + ',' +
               digits(most) + (is_open ? ",true]" : ",false]");
      }
      out += "],\"random\":" + quoted(op.random_) + ",\"limits\":" + lists(op.limits_) +
             ",\"belows\":" + lists(op.belows_) + ",\"results\":[";
      for (const Op::Result& result : op.results_) {
        const bool own = result.dtype != DType::kUnsupported;
        out += (out.back() == '[' ? "" : ",") +
               list({result.output, result.like, own ? name(result.dtype) : ""});
      }
      out += "],\"saved\":" + list(op.saved_) + ",\"hidden\":" + list(op.hidden_) +
             ",\"no_gradient\":" + list(op.no_gradient_) + ",\"linear\":" + list(op.linear_) +
             ",\"tags\":" + list(op.tags_) + ",\"nondeterministic\":" + list(op.nondeterministic_) +
             ",\"broadcast\":" + (op.checks_.expands ? "true" : "false") +
             ",\"calls\":" + list(op.calls_) + ",\"kernels\":[";
      for (const detail::Kernel& kernel : op.kernels_) {
        if (&kernel != &op.kernels_.front()) out += ',';
        out += "{\"key\":" + quoted(kernel.key) + ",\"arguments\":" + list(kernel.arguments) +
               ",\"returns\":" + list(kernel.returns) + ",\"call\":" + address(kernel.call) +
               ",\"trampoline\":" + address(kernel.trampoline) +
               ",\"slot\":" + address(kernel.slot) + ",\"by_torch\":" + address(kernel.by_torch) +
               "}";
      }
      out += "]}";
    }
    return out + "]}";
  }

 private:
  template <class T>
  static std::string address(T* pointer) {
    return std::to_string(reinterpret_cast<uintptr_t>(pointer));
  }

  // As Python's json reads it.
  static std::string digits(double value) {
    if (std::isinf(value)) return value < 0 ? "-Infinity" : "Infinity";
    char text[32];
    std::snprintf(text, sizeof text, "%.17g", value);
    return text;
  }

  static std::string quoted(const std::string& text) {
    std::string out = "\"";
    for (const char c : text) {
      if (c == '"' || c == '\\') out += '\\';
      if (c == '\n')
        out += "\\n";
      else
        out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
    return out + '"';
  }

  static std::string dtypes(const std::vector<DType>& allowed) {
    std::vector<const char*> names;
    for (const DType dtype : allowed) names.push_back(name(dtype));
    return list(names);
  }

  static std::string lists(const std::vector<std::pair<const char*, const char*>>& pairs) {
    std::string text = "[";
    for (const auto& [name, dim] : pairs) text += (text.size() > 1 ? "," : "") + list({name, dim});
    return text + "]";
  }

  static std::string list(const std::vector<const char*>& names) {
    std::string text = "[";
    for (const char* name : names) text += (text.size() > 1 ? "," : "") + quoted(name);
    return text + "]";
  }

  std::string space_;
  std::deque<Op> ops_;  // a deque: entries keep pointers into its elements
};

}  // namespace cuda_ops

#define CUDA_OPS_EXPORT extern "C" __attribute__((visibility("default")))

// CUDA_OPS(library) or CUDA_OPS(my_ops, library), by the number of arguments.
#define CUDA_OPS(...) CUDA_OPS_CHOSEN(__VA_ARGS__, CUDA_OPS_IN, CUDA_OPS_IN_CUDA_OPS, )(__VA_ARGS__)
#define CUDA_OPS_CHOSEN(first, second, macro, ...) macro
#define CUDA_OPS_IN_CUDA_OPS(library) CUDA_OPS_IN(cuda_ops, library)

// Four functions are all that a library shows.
#define CUDA_OPS_IN(space, library)                                                                \
  static void cuda_ops_define(::cuda_ops::Library& library);                                       \
  CUDA_OPS_EXPORT const char* cuda_ops_manifest(const ::cuda_ops::Host* lent) {                    \
    static ::cuda_ops::Library built(#space);                                                      \
    static std::string json;                                                                       \
    ::cuda_ops::host = *lent;                                                                      \
    if (json.empty()) {                                                                            \
      cuda_ops_define(built);                                                                      \
      json = built.json();                                                                         \
    }                                                                                              \
    return json.c_str();                                                                           \
  }                                                                                                \
  CUDA_OPS_EXPORT void cuda_ops_check(void* checks, const void* rules) {                           \
    static_cast<::cuda_ops::detail::Checks*>(checks)->rules =                                      \
        static_cast<const ::cuda_ops::detail::Rules*>(rules);                                      \
  }                                                                                                \
  /* Returns 0 on success. */                                                                      \
  CUDA_OPS_EXPORT int cuda_ops_register(const char* op, const char* key, void* trampoline) {       \
    TorchLibraryHandle handle = nullptr;                                                           \
    if (aoti_torch_library_init_impl(#space, key, __FILE__, __LINE__, &handle) != 0) {             \
      return 1;                                                                                    \
    }                                                                                              \
    /* The handle is never deleted: a registration lives as long as the process. */                \
    return torch_library_impl(handle, op, reinterpret_cast<::cuda_ops::detail::Boxed>(trampoline), \
                              TORCH_ABI_VERSION);                                                  \
  }                                                                                                \
  CUDA_OPS_EXPORT void cuda_ops_store(void* slot, void* call) {                                    \
    static_cast<std::atomic<::cuda_ops::detail::Boxed>*>(slot)->store(                             \
        reinterpret_cast<::cuda_ops::detail::Boxed>(call), std::memory_order_release);             \
  }                                                                                                \
  static void cuda_ops_define(::cuda_ops::Library& library)
