// A C++ function as a kernel of the dispatcher: what its types are called in a schema, and the
// entry that takes its arguments from the dispatcher's stack, checks them, and puts back its
// results.
//
// The dispatcher gets a trampoline, which jumps through an atomic slot: a reload stores the new
// library's function in the slot, so no call ever sees a half-updated dispatch table.
#pragma once

#include <torch/csrc/stable/library.h>

#include <atomic>
#include <optional>
#include <tuple>
#include <type_traits>

#include "checks.h"
#include "names.h"
#include "tensor.h"

namespace cuda_ops {
namespace detail {

// --- C++ types by their schema names

template <class T>
constexpr bool kIsNumber = std::is_arithmetic_v<T>;
template <class T>
constexpr bool kIsNumber<std::optional<T>> = kIsNumber<T>;
template <class T>
constexpr bool kIsNumber<std::vector<T>> = kIsNumber<T>;

template <class T, class = void>
struct SchemaType {  // a type without a schema counterpart ends here
  static_assert(!kIsNumber<T>, "a schema's float is double in C++, and its int is int64_t");
  static_assert(kIsNumber<T>, "no schema has this C++ type; docs/binding.md lists those there are");
  static constexpr const char* name = "";
};

// clang-format off
template <> struct SchemaType<Tensor> { static constexpr const char* name = "Tensor"; };
template <> struct SchemaType<int64_t> { static constexpr const char* name = "int"; };
template <> struct SchemaType<double> { static constexpr const char* name = "float"; };
template <> struct SchemaType<bool> { static constexpr const char* name = "bool"; };
template <> struct SchemaType<ScalarType> { static constexpr const char* name = "ScalarType"; };
template <> struct SchemaType<std::vector<Tensor>> { static constexpr const char* name = "Tensor[]"; };
template <> struct SchemaType<std::vector<int64_t>> { static constexpr const char* name = "int[]"; };
template <> struct SchemaType<std::vector<double>> { static constexpr const char* name = "float[]"; };
template <> struct SchemaType<std::optional<Tensor>> { static constexpr const char* name = "Tensor?"; };
template <> struct SchemaType<std::optional<int64_t>> { static constexpr const char* name = "int?"; };
template <> struct SchemaType<std::optional<double>> { static constexpr const char* name = "float?"; };
template <> struct SchemaType<std::optional<bool>> { static constexpr const char* name = "bool?"; };
template <> struct SchemaType<std::optional<ScalarType>> {
  static constexpr const char* name = "ScalarType?";
};
template <> struct SchemaType<Device> { static constexpr const char* name = "Device"; };
template <> struct SchemaType<std::optional<Device>> { static constexpr const char* name = "Device?"; };
template <> struct SchemaType<std::vector<std::optional<Tensor>>> { static constexpr const char* name = "Tensor?[]"; };
template <> struct SchemaType<std::vector<bool>> { static constexpr const char* name = "bool[]"; };
template <> struct SchemaType<std::optional<std::vector<bool>>> { static constexpr const char* name = "bool[]?"; };
template <> struct SchemaType<std::optional<std::vector<int64_t>>> { static constexpr const char* name = "int[]?"; };
template <> struct SchemaType<std::optional<std::vector<double>>> { static constexpr const char* name = "float[]?"; };
template <> struct SchemaType<std::string> { static constexpr const char* name = "str"; };
template <> struct SchemaType<std::optional<std::string>> { static constexpr const char* name = "str?"; };
// The loader takes an enum for a str that .one_of lists the names of.
template <class T> struct SchemaType<T, std::enable_if_t<kIsNamed<T>>> { static constexpr const char* name = "enum"; };
template <class T> struct SchemaType<std::optional<T>, std::enable_if_t<kIsNamed<T>>> {
  static constexpr const char* name = "enum?";
};

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
  template <class T> using Held = typename Holding<Value<T>>::Type;

  inline static const Checks* checks = nullptr;
  inline static std::atomic<Boxed> slot{nullptr};

  static void call(StableIValue* stack, uint64_t, uint64_t) {
    try {
      constexpr auto kPositions = std::index_sequence_for<Args...>();
      std::tuple<Held<Args>...> args = unbox(stack, kPositions);
      check(args);
      if (checks->writes()) separate(args);
      if (checks->expands) broadcast(args);
      if constexpr (std::is_void_v<R>) {
        run(args, kPositions);
      } else {
        Returns<R>::push(stack, run(args, kPositions));
      }
    } catch (const OpError& error) {
      throw std::runtime_error(checks->op + ": " + error.what());
    } catch (const UnknownDType& error) {
      throw std::runtime_error(checks->op + ": " + error.what());
    }
  }

  // Registered once, for the life of the process.
  static void trampoline(StableIValue* stack, uint64_t inputs, uint64_t outputs) {
    Boxed target = slot.load(std::memory_order_acquire);
    if (target == nullptr) {
      throw std::runtime_error(checks->op +
                               ": the library reloaded last has no "
                               "kernel for this device any more; add it back to the binding");
    }
    target(stack, inputs, outputs);
  }

 private:
  template <size_t... I>
  static auto unbox(StableIValue* stack, std::index_sequence<I...>) {
    return std::tuple<Held<Args>...>{unboxed<Held<Args>>(stack[I])...};
  }

  template <size_t... I>
  static R run(std::tuple<Held<Args>...>& args, std::index_sequence<I...>) {
    return Function(passed<Value<Args>>(std::get<I>(args), I)...);
  }

  template <class T, class H>
  static decltype(auto) passed(H& held, size_t position) {
    if constexpr (std::is_same_v<T, H>) {
      return (held);
    } else if constexpr (std::is_same_v<H, std::string>) {
      return static_cast<T>(checks->index_of(held, position));
    } else {
      using Enum = typename T::value_type;
      return held ? T(static_cast<Enum>(checks->index_of(*held, position))) : T();
    }
  }

  template <class T>
  static const T* given(const T& value) {
    return &value;
  }
  template <class T>
  static const T* given(const std::optional<T>& value) {
    return value ? &*value : nullptr;
  }

  template <class T, class Arg>
  static constexpr bool kMayBe = std::is_same_v<Arg, T> || std::is_same_v<Arg, std::optional<T>>;

  template <class Arg>
  static constexpr bool kIsList = std::is_same_v<Arg, std::vector<Tensor>> ||
                                  std::is_same_v<Arg, std::vector<std::optional<Tensor>>>;

  static void check(const std::tuple<Held<Args>...>& args) {
    constexpr size_t kMost = sizeof...(Args) + 1;
    const Tensor* tensors[kMost] = {};
    const int64_t* ints[kMost] = {};
    size_t count = 0, position = 0;
    const auto sort_in = [&](const auto& arg) {
      using Arg = Value<decltype(arg)>;
      if constexpr (kMayBe<Tensor, Arg>) tensors[count++] = given(arg);
      if constexpr (kMayBe<int64_t, Arg>) ints[position] = given(arg);
      ++position;
    };
    std::apply([&](const Held<Args>&... arg) { (sort_in(arg), ...); }, args);
    checks->run(tensors, ints);
    each<double>(args, [](double one, size_t at) { checks->check_float(one, at); });
    each<ScalarType>(args, [](ScalarType one, size_t at) { checks->check_scalar_type(one, at); });
    each<std::string>(args, [](const std::string& one, size_t at) { checks->index_of(one, at); });
    if constexpr ((kIsList<Value<Args>> || ...)) {
      const Tensor* const* given = std::find_if(tensors, tensors + count, [](auto t) { return t; });
      check_lists(args, given == tensors + count ? nullptr : *given);
    }
  }

  // Gives all tensors that have loop dims those of all of them together.
  static void broadcast(std::tuple<Held<Args>...>& args) {
    constexpr size_t kMost = sizeof...(Args) + 1;
    Tensor* tensors[kMost] = {};
    size_t count = 0;
    const auto collect = [&](auto& arg) {
      using Arg = Value<decltype(arg)>;
      if constexpr (kMayBe<Tensor, Arg>) tensors[count++] = const_cast<Tensor*>(given(arg));
    };
    std::apply([&](Held<Args>&... arg) { (collect(arg), ...); }, args);
    checks->expand(tensors);
  }

  // Copies what is read and lies in memory that is written; refuses two that are written.
  static void separate(std::tuple<Held<Args>...>& args) {
    std::vector<Checks::Passed> passed;
    size_t position = 0;
    const auto collect = [&](const auto& arg) {
      using Arg = Value<decltype(arg)>;
      const auto add = [&](const Tensor* tensor) {
        if (tensor != nullptr) passed.push_back({const_cast<Tensor*>(tensor), position});
      };
      if constexpr (kMayBe<Tensor, Arg>) add(given(arg));
      if constexpr (kIsList<Arg>) {
        for (const auto& one : arg) add(given(one));
      }
      ++position;
    };
    std::apply([&](const Held<Args>&... arg) { (collect(arg), ...); }, args);
    checks->separate(passed);
  }

  // Calls check(value, position) of each argument that is a T and given.
  template <class T, class Check>
  static void each(const std::tuple<Held<Args>...>& args, Check check) {
    size_t position = 0;
    const auto check_one = [&](const auto& arg) {
      if constexpr (kMayBe<T, Value<decltype(arg)>>) {
        if (const T* value = given(arg)) check(*value, position);
      }
      ++position;
    };
    std::apply([&](const Held<Args>&... arg) { (check_one(arg), ...); }, args);
  }

  static void check_lists(const std::tuple<Held<Args>...>& args, const Tensor* first) {
    size_t position = 0;
    const auto check_one = [&](const auto& arg) {
      if constexpr (kIsList<Value<decltype(arg)>>) {
        for (const auto& one : arg) {
          const Tensor* const tensor = given(one);
          if (tensor == nullptr) continue;
          if (first == nullptr) first = tensor;
          checks->check_listed(*tensor, position, *first);
        }
      }
      ++position;
    };
    std::apply([&](const Held<Args>&... arg) { (check_one(arg), ...); }, args);
  }
};

struct Kernel {
  const char* key;
  std::vector<const char*> arguments, returns;
  Boxed call, trampoline;
  std::atomic<Boxed>* slot;
  Boxed by_torch;  // or null
};

}  // namespace detail

}  // namespace cuda_ops
