// How a binding says what it is. `CUDA_OPS(library) { ... }` lists operators:
//
//   CUDA_OPS(library) {
//     library.op("silu(Tensor x) -> Tensor", "()->()")
//         .dtypes(kFloating)
//         .cpu<silu_cpu>()
//         .cuda<silu_cuda>();
//   }
//
// The library exports that list as JSON; nothing registers itself when it is
// opened. The loader reads the list, compares the C++ types with the schema,
// and only then asks for registration. The dispatcher gets a trampoline, which
// jumps through an atomic slot: a reload stores the new library's function in
// the slot, so no call ever sees a half-updated dispatch table.
#pragma once

#include <torch/csrc/stable/library.h>

#include <atomic>
#include <deque>
#include <optional>
#include <tuple>
#include <type_traits>

#include "checks.h"
#include "launch.h"

#ifndef CUDA_OPS_SOURCE_HASH
#define CUDA_OPS_SOURCE_HASH ""
#endif

namespace cuda_ops {
namespace detail {

// --- C++ types by their schema names

template <class T>
struct SchemaType;  // an argument type without a schema counterpart ends here

// clang-format off
template <> struct SchemaType<Tensor> { static constexpr const char* name = "Tensor"; };
template <> struct SchemaType<int64_t> { static constexpr const char* name = "int"; };
template <> struct SchemaType<double> { static constexpr const char* name = "float"; };
template <> struct SchemaType<bool> { static constexpr const char* name = "bool"; };
template <> struct SchemaType<torch::headeronly::ScalarType> {
  static constexpr const char* name = "ScalarType";
};
template <> struct SchemaType<std::vector<Tensor>> { static constexpr const char* name = "Tensor[]"; };
template <> struct SchemaType<std::vector<int64_t>> { static constexpr const char* name = "int[]"; };
template <> struct SchemaType<std::vector<double>> { static constexpr const char* name = "float[]"; };
template <> struct SchemaType<std::optional<Tensor>> { static constexpr const char* name = "Tensor?"; };
template <> struct SchemaType<std::optional<int64_t>> { static constexpr const char* name = "int?"; };
template <> struct SchemaType<std::optional<double>> { static constexpr const char* name = "float?"; };
template <> struct SchemaType<std::optional<bool>> { static constexpr const char* name = "bool?"; };

// clang-format on

template <class... T>
std::vector<const char*> schema_types() {
  return {SchemaType<T>::name...};
}

template <class R> struct Returns {
  static std::vector<const char*> types() { return schema_types<R>(); }
  static void push(StableIValue* stack, R&& value) {
    stack[0] = torch::stable::detail::from<R>(std::move(value));
  }
};
template <class... R> struct Returns<std::tuple<R...>> {
  static std::vector<const char*> types() { return schema_types<R...>(); }
  static void push(StableIValue* stack, std::tuple<R...>&& values) {
    std::apply(
        [&](R&... value) {
          size_t i = 0;
          ((stack[i++] = torch::stable::detail::from<R>(value)), ...);
        },
        values);
  }
};

// --- one C++ function as a dispatcher kernel ----------------------------------

using Boxed = void (*)(StableIValue*, uint64_t, uint64_t);

template <auto Function, class Type = decltype(Function)>
struct Entry;

template <auto Function, class R, class... Args>
struct Entry<Function, R (*)(Args...)> {
  template <class T> using Value = std::remove_cv_t<std::remove_reference_t<T>>;

  inline static const Checks* checks = nullptr;
  inline static std::atomic<Boxed> slot{nullptr};

  static void call(StableIValue* stack, uint64_t, uint64_t) {
    std::tuple<Value<Args>...> args = unbox(stack, std::index_sequence_for<Args...>());
    check(args);
    try {
      if constexpr (std::is_void_v<R>) {
        std::apply(Function, args);
      } else {
        Returns<R>::push(stack, std::apply(Function, args));
      }
    } catch (const Refusal& refusal) {
      throw std::runtime_error("cuda_ops::" + checks->op + ": " + refusal.what());
    }
  }

  // Registered once, for the life of the process.
  static void trampoline(StableIValue* stack, uint64_t inputs, uint64_t outputs) {
    Boxed target = slot.load(std::memory_order_acquire);
    if (target == nullptr) {
      throw std::runtime_error("cuda_ops::" + checks->op +
                               ": the library reloaded last has no "
                               "kernel for this device any more; add it back to the binding");
    }
    target(stack, inputs, outputs);
  }

 private:
  template <size_t... I>
  static auto unbox(StableIValue* stack, std::index_sequence<I...>) {
    return std::tuple<Value<Args>...>{torch::stable::detail::to<Value<Args>>(stack[I])...};
  }

  static const Tensor* tensor_in(const Tensor& value) { return &value; }
  static const Tensor* tensor_in(const std::optional<Tensor>& value) {
    return value ? &*value : nullptr;
  }

  static void check(const std::tuple<Value<Args>...>& args) {
    constexpr size_t kMost = sizeof...(Args) + 1;
    const Tensor* tensors[kMost] = {};
    size_t count = 0;
    std::apply(
        [&](const Value<Args>&... arg) {
          (
              [&] {
                using T = Value<Args>;
                if constexpr (std::is_same_v<T, Tensor> ||
                              std::is_same_v<T, std::optional<Tensor>>) {
                  tensors[count++] = tensor_in(arg);
                }
              }(),
              ...);
        },
        args);
    if (checks != nullptr) checks->run(tensors, count);
  }
};

struct Kernel {
  const char* key;
  std::vector<const char*> arguments, returns;
  Boxed call, trampoline;
  std::atomic<Boxed>* slot;
};

}  // namespace detail

// --- the builder a binding talks to --------------------------------------------

class Op {
 public:
  Op(std::string schema, std::string signature)
      : schema_(std::move(schema)), signature_(std::move(signature)) {
    checks_.op = schema_.substr(0, schema_.find('('));
    read_tensor_names();
    read_core_dims();
  }

  // Every tensor argument has one of these dtypes, all of them the same one.
  template <size_t N>
  Op& dtypes(const DType (&allowed)[N]) {
    checks_.dtypes.assign(allowed, allowed + N);
    return *this;
  }

  // The docstring of the public Python function.
  Op& doc(const char* text) {
    doc_ = text;
    return *this;
  }

  // An operator of another pair that this one calls, here or in its gradients:
  // loaded before it, built before it is compared with its reference.
  Op& calls(const char* op) {
    calls_.push_back(op);
    return *this;
  }

  template <auto Function>
  Op& cpu() {
    return kernel<Function>("CPU");
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
                          &E::slot};
    if constexpr (!std::is_void_v<R>) kernel.returns = detail::Returns<R>::types();
    return kernel;
  }

  // "f(Tensor x, float a, Tensor? b) -> ..." : x, b
  void read_tensor_names() {
    const size_t end = schema_.find("->");
    size_t at = schema_.find('(');
    while (at != std::string::npos && at < end) {
      const size_t stop = schema_.find_first_of(",", at + 1);
      std::string part = schema_.substr(at + 1, std::min(stop, end) - at - 1);
      const size_t word = part.find("Tensor");
      if (word != std::string::npos && part.compare(word + 6, 2, "[]") != 0) {
        const size_t name = part.find_first_not_of(' ', part.find(' ', word));
        if (name != std::string::npos) {
          checks_.tensor_names.push_back(part.substr(name, part.find_first_of(" )=", name) - name));
        }
      }
      at = stop;
    }
  }

  // "(m,k),[k,n]->(m,n)" : {m, k}, {k, n} without loop dims
  void read_core_dims() {
    std::string dim;
    const size_t end = std::min(signature_.find("->"), signature_.size());
    for (size_t i = 0; i < end; ++i) {
      const char c = signature_[i];
      const bool separates = c == ',' || c == ')' || c == ']';
      if (c == '(' || c == '[') {
        checks_.core_dims.push_back({{}, c == '('});
      } else if (separates && !dim.empty() && !checks_.core_dims.empty()) {
        checks_.core_dims.back().dims.emplace_back(std::exchange(dim, ""));
      } else if (!separates && c != ' ') {
        dim += c;
      }
    }
  }

  std::string schema_, signature_, doc_;
  detail::Checks checks_;
  std::vector<const char*> calls_;
  std::vector<detail::Kernel> kernels_;
  bool has_cuda_ = false;
};

class Library {
 public:
  // `schema` without a namespace; `signature` in NumPy's generalized-ufunc
  // form, one group per tensor argument and per output, or "" for none.
  Op& op(const char* schema, const char* signature) { return ops_.emplace_back(schema, signature); }

  // Strings only: a stream would drag in the locale machinery, which crashes in a
  // process that holds two copies of libstdc++ (a toolchain that links it statically).
  std::string json() const {
    std::string out = "{\"format\":1,\"archs\":" + quoted(CUDA_OPS_ARCHS) +
                      ",\"source_hash\":" + quoted(CUDA_OPS_SOURCE_HASH) + ",\"ops\":[";
    for (const Op& op : ops_) {
      if (&op != &ops_.front()) out += ',';
      out += "{\"schema\":" + quoted(op.schema_) + ",\"signature\":" + quoted(op.signature_) +
             ",\"doc\":" + quoted(op.doc_) + ",\"has_cuda\":" + (op.has_cuda_ ? "true" : "false") +
             ",\"dtypes\":[";
      for (size_t i = 0; i < op.checks_.dtypes.size(); ++i) {
        out += (i ? "," : "") + quoted(cuda_ops::name(op.checks_.dtypes[i]));
      }
      out += "],\"calls\":" + list(op.calls_) + ",\"kernels\":[";
      for (const detail::Kernel& kernel : op.kernels_) {
        if (&kernel != &op.kernels_.front()) out += ',';
        out += "{\"key\":" + quoted(kernel.key) + ",\"arguments\":" + list(kernel.arguments) +
               ",\"returns\":" + list(kernel.returns) + ",\"call\":" + address(kernel.call) +
               ",\"trampoline\":" + address(kernel.trampoline) +
               ",\"slot\":" + address(kernel.slot) + "}";
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

  static std::string list(const std::vector<const char*>& names) {
    std::string text = "[";
    for (const char* name : names) text += (text.size() > 1 ? "," : "") + quoted(name);
    return text + "]";
  }

  std::deque<Op> ops_;  // a deque: entries keep pointers into its elements
};

}  // namespace cuda_ops

#define CUDA_OPS_EXPORT extern "C" __attribute__((visibility("default")))

// Three functions are all that a library shows. They return 0 on success.
#define CUDA_OPS(library)                                                                          \
  static void cuda_ops_define(::cuda_ops::Library& library);                                       \
  CUDA_OPS_EXPORT const char* cuda_ops_manifest(const ::cuda_ops::Host* lent) {                    \
    static ::cuda_ops::Library built;                                                              \
    static std::string json;                                                                       \
    ::cuda_ops::host = *lent;                                                                      \
    if (json.empty()) {                                                                            \
      cuda_ops_define(built);                                                                      \
      json = built.json();                                                                         \
    }                                                                                              \
    return json.c_str();                                                                           \
  }                                                                                                \
  CUDA_OPS_EXPORT int cuda_ops_register(const char* op, const char* key, void* trampoline) {       \
    TorchLibraryHandle handle = nullptr;                                                           \
    if (aoti_torch_library_init_impl("cuda_ops", key, __FILE__, __LINE__, &handle) != 0) {         \
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
