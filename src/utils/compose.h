// Operators made of other operators. A call goes through the dispatcher, so
// autograd, torch.compile, autocast and every device see it.
#pragma once

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h>
#include <torch/csrc/stable/stableivalue_conversions.h>

#include <tuple>

#include "tensor.h"

namespace cuda_ops {

namespace detail {

template <class R>
struct Returned {
  static constexpr size_t kCount = 1;
  static R from_stack(const StableIValue* stack) { return torch::stable::detail::to<R>(stack[0]); }
};
template <class... R>
struct Returned<std::tuple<R...>> {
  static constexpr size_t kCount = sizeof...(R);
  static std::tuple<R...> from_stack(const StableIValue* stack) {
    // Braces take the values in order.
    return std::tuple<R...>{torch::stable::detail::to<R>(*stack++)...};
  }
};

}  // namespace detail

// `op` with its namespace, "aten::mul", and `overload`, "Tensor". Arguments
// come in the order of the schema and all of them must be given. The stable
// dispatcher passes no Scalar: hand over a tensor from scalar() where the
// schema has room for one.
// Several returns are a std::tuple.
template <class R, class... Args>
R call(const char* op, const char* overload, const Args&... args) {
  static_assert(detail::Returned<R>::kCount <= sizeof...(Args), "returns need room");
  static_assert(
      !(... || (std::is_same_v<Args, std::string> || std::is_same_v<std::decay_t<Args>, char*> ||
                std::is_same_v<Args, std::optional<std::string>>)),
      "torch's C interface leaks a str that it is handed; call aoti_torch_aten_<op> of "
      "c_shim_aten.h, which takes a const char*, or an operator that takes an int instead");
  std::array<StableIValue, sizeof...(Args)> stack{torch::stable::detail::from(args)...};
  if (torch_call_dispatcher(op, overload, stack.data(), TORCH_ABI_VERSION) != TORCH_SUCCESS) {
    detail::torch_failed(std::string("run ") + op);
  }
  return detail::Returned<R>::from_stack(stack.data());
}

// A number as a 0-dim CPU tensor, which combines with `like` on any device and
// leaves it its dtype. It goes to CUDA as a kernel argument, so a graph can
// record it. float64 keeps all its digits; only beside another 0-dim tensor
// would that promote, hence the dtype of `like` there, to which it is rounded.
inline Tensor scalar(double value, const Tensor& like) {
  int32_t dtype = detail::torch_code(like.dim() > 0 ? DType::kFloat64 : dtype_of(like));
  int32_t cpu = aoti_torch_device_type_cpu();
  AtenTensorHandle handle = nullptr;
  detail::check_torch(
      aoti_torch_aten_full(nullptr, 0, value, &dtype, nullptr, &cpu, -1, nullptr, &handle),
      "make a scalar");
  return Tensor(handle);
}

inline Tensor mul(const Tensor& a, const Tensor& b) {
  return call<Tensor>("aten::mul", "Tensor", a, b);
}

// a + b. aten::add takes a Scalar, which has a way through for subtract only.
inline Tensor add(const Tensor& a, const Tensor& b) {
  AtenTensorHandle handle = nullptr;
  detail::check_torch(aoti_torch_aten_subtract_Tensor(a.get(), b.get(), -1, &handle),
                      "run aten::subtract");
  return Tensor(handle);
}

}  // namespace cuda_ops
