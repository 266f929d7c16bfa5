// Arguments of type str: read without a leak, and passed on as an enum where the C++ function
// takes one.
#pragma once

#include <torch/csrc/stable/library.h>

#include <optional>
#include <string>
#include <type_traits>

#include "tensor.h"

namespace cuda_ops {
namespace detail {

// Whether T is an enum of the binding's own: the names that .one_of lists, in their order.
template <class T>
constexpr bool kIsNamed = std::is_enum_v<T> && !std::is_same_v<T, ScalarType>;

// How a call holds an argument of type T: an enum stays a name until the name has been checked.
template <class T>
struct Holding {
  using Type = std::conditional_t<kIsNamed<T>, std::string, T>;
};
template <class T>
struct Holding<std::optional<T>> {
  using Type = std::optional<typename Holding<T>::Type>;
};

// torch's own conversion returns a copy of a string on the heap that nothing deletes.
inline std::string take_string(StringHandle handle) {
  struct Owned {
    StringHandle handle;
    ~Owned() { torch_delete_string(handle); }
  } owned{handle};
  size_t length = 0;
  const char* text = nullptr;
  check_torch(torch_string_length(handle, &length), "read a string");
  check_torch(torch_string_c_str(handle, &text), "read a string");
  return {text, length};
}

// An argument off torch's stack, whose memory it takes over.
template <class T>
T unboxed(StableIValue value) {
  using torch::stable::detail::to;
  if constexpr (std::is_same_v<T, std::string>) {
    return take_string(to<StringHandle>(value));
  } else if constexpr (std::is_same_v<T, std::optional<std::string>>) {
    const auto handle = to<std::optional<StringHandle>>(value);
    return handle ? T(take_string(*handle)) : T();
  } else {
    return to<T>(value);
  }
}

}  // namespace detail
}  // namespace cuda_ops
