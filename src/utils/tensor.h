// Tensors as a binding sees them: the stable ABI's Tensor, its dtype as our
// enum, allocation with a stated layout, and errors in one voice.
#pragma once

#include <torch/csrc/stable/device.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "dtype.h"

// torch has it from 2.13 on; null before.
extern "C" __attribute__((weak)) const char* torch_exception_get_what_without_backtrace();

namespace cuda_ops {

using torch::headeronly::ScalarType;
using torch::stable::Device;
using torch::stable::Tensor;

constexpr DType kFloating[] = {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16};
constexpr DType kInt64[] = {DType::kInt64};  // indices

// An error that does not name its operator: the entry that was called puts the name in front.
struct OpError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

namespace detail {

[[noreturn]] inline void torch_failed(std::string what) {
  what = "torch failed to " + what;
  if (torch_exception_get_what_without_backtrace != nullptr) {
    std::string reason = torch_exception_get_what_without_backtrace();
    reason = reason.substr(0, reason.find("\n\nAt:"));  // where Python was
    what += ": ";
    what += reason.find_first_not_of(" \n") != std::string::npos
                ? reason
                : "a Python exception without a text, such as the one with which "
                  "torch.utils.checkpoint ends a recomputation early; wrap the call in "
                  "torch.utils.checkpoint.set_checkpoint_early_stop(False)";
  } else {
    what += "; torch 2.13 and later say why";
  }
  throw OpError(what);
}

inline void check_torch(AOTITorchError error, const char* what) {
  if (error != TORCH_SUCCESS) torch_failed(what);
}

// torch's number for each DType, which is the same from torch 2.10 on.
constexpr ScalarType kTorchCodes[] = {ScalarType::Double,
                                      ScalarType::Float,
                                      ScalarType::Half,
                                      ScalarType::BFloat16,
                                      ScalarType::Float8_e4m3fn,
                                      ScalarType::Float8_e5m2,
                                      ScalarType::Float8_e8m0fnu,
                                      ScalarType::Float4_e2m1fn_x2,
                                      ScalarType::Byte,
                                      ScalarType::UInt16,
                                      ScalarType::UInt32,
                                      ScalarType::UInt64,
                                      ScalarType::Char,
                                      ScalarType::Short,
                                      ScalarType::Int,
                                      ScalarType::Long,
                                      ScalarType::Bool,
                                      ScalarType::ComplexFloat,
                                      ScalarType::ComplexDouble};
constexpr size_t kDTypes = std::size(kTorchCodes);
static_assert(kDTypes == static_cast<size_t>(DType::kUnsupported));

inline int32_t torch_code(DType dtype) {
  const auto i = static_cast<size_t>(dtype);
  if (i >= kDTypes) throw UnknownDType();
  return static_cast<int32_t>(kTorchCodes[i]);
}

}  // namespace detail

// ScalarType, the argument of a schema, numbers the dtypes as torch does.
inline ScalarType scalar_type(const Tensor& tensor) {
  int32_t code = 0;
  detail::check_torch(aoti_torch_get_dtype(tensor.get(), &code), "read a dtype");
  return static_cast<ScalarType>(code);
}

inline DType dtype_of(ScalarType dtype) {
  for (size_t i = 0; i < detail::kDTypes; ++i) {
    if (detail::kTorchCodes[i] == dtype) return static_cast<DType>(i);
  }
  return DType::kUnsupported;
}

// The dtype that a ScalarType? argument says, or `otherwise` for None.
inline DType dtype_of(const std::optional<ScalarType>& dtype, DType otherwise) {
  return dtype ? dtype_of(*dtype) : otherwise;
}

inline DType dtype_of(const Tensor& tensor) { return dtype_of(scalar_type(tensor)); }

// The dtype in torch's words, also if DType has no counterpart.
inline std::string dtype_name(ScalarType dtype) {
  const DType known = dtype_of(dtype);
  if (known != DType::kUnsupported) return name(known);
  if (dtype == ScalarType::ComplexHalf) return "complex32";
  std::string text = torch::headeronly::toString(dtype);  // Float8_e4m3fn
  for (char& c : text) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  return text;
}

inline std::string dtype_name(const Tensor& tensor) { return dtype_name(scalar_type(tensor)); }

struct DeviceId {
  int32_t type = 0;
  int32_t index = 0;

  bool operator==(const DeviceId& other) const {
    return type == other.type && index == other.index;
  }
  bool operator!=(const DeviceId& other) const { return !(*this == other); }
};

inline DeviceId device_of(const Tensor& tensor) {
  DeviceId device;
  detail::check_torch(aoti_torch_get_device_type(tensor.get(), &device.type), "read a device");
  detail::check_torch(aoti_torch_get_device_index(tensor.get(), &device.index), "read a device");
  return device;
}

// Device, the argument of a schema, in the same numbers.
inline DeviceId device_of(const Device& device) {
  using torch::stable::detail::from;
  return {static_cast<int32_t>(from(device.type())), static_cast<int32_t>(device.index())};
}

// Neither sparse nor in a library's own layout: without strides there is nothing to read.
inline bool is_strided(const Tensor& tensor) {
  int32_t layout = 0;
  detail::check_torch(aoti_torch_get_layout(tensor.get(), &layout), "read a layout");
  return layout == aoti_torch_layout_strided();
}

inline std::string name(DeviceId device) {
  if (device.type == aoti_torch_device_type_cpu()) return "cpu";
  if (device.type == aoti_torch_device_type_meta()) return "meta";
  const bool cuda = device.type == aoti_torch_device_type_cuda();
  return (cuda ? "cuda:" : "device:") + std::to_string(device.index);
}

// A tensor, or a chunk of its last dim, as plain numbers. Shape and strides stay
// the tensor's, so it must outlive the view.
struct View {
  void* data = nullptr;
  DType dtype = DType::kUnsupported;
  int dims = 0;
  const int64_t* sizes = nullptr;  // of the tensor; size() knows of chunks
  const int64_t* strides = nullptr;
  int64_t last_size = 1;

  View() = default;
  // To read from. Writing goes through `writable_view`.
  View(const Tensor& tensor) : View(tensor, const_cast<void*>(tensor.const_data_ptr())) {}

  int64_t size(int d) const { return d == dims - 1 ? last_size : sizes[d]; }

  // Part `index` of `parts` equal ones of the last dim, as torch.chunk has them.
  View chunk(int parts, int index) const {
    View part = *this;
    part.last_size = last_size / parts;
    const int64_t skipped = index * part.last_size * strides[dims - 1];
    part.data = static_cast<char*>(data) + skipped * size_of(dtype);
    return part;
  }

 private:
  friend View writable_view(const Tensor& tensor);

  View(const Tensor& tensor, void* at)
      : data(at), dtype(dtype_of(tensor)), dims(static_cast<int>(tensor.dim())) {
    int64_t *shape = nullptr, *steps = nullptr;
    detail::check_torch(aoti_torch_get_sizes(tensor.get(), &shape), "read a shape");
    detail::check_torch(aoti_torch_get_strides(tensor.get(), &steps), "read strides");
    sizes = shape;
    strides = steps;
    if (dims > 0) last_size = sizes[dims - 1];
  }
};

// The view of an output.
inline View writable_view(const Tensor& tensor) { return View(tensor, tensor.mutable_data_ptr()); }

inline std::string shape_name(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t d = 0; d < shape.size(); ++d) text += (d ? ", " : "") + std::to_string(shape[d]);
  return text + "]";
}

inline std::string shape_name(const View& view) {
  std::vector<int64_t> shape(view.dims);
  for (int d = 0; d < view.dims; ++d) shape[d] = view.size(d);
  return shape_name(shape);
}

// Broadcasts `shape` with the first `rank` dims of `view`; false, and nothing done, if they
// do not fit.
inline bool broadcast(std::vector<int64_t>& shape, const View& view, int rank) {
  const auto dims = static_cast<int>(shape.size());
  for (int d = 1; d <= rank && d <= dims; ++d) {
    const int64_t size = shape[dims - d], actual = view.size(rank - d);
    if (size != 1 && actual != 1 && size != actual) return false;
  }
  if (rank > dims) shape.insert(shape.begin(), rank - dims, 1);
  for (int d = 1; d <= rank; ++d) {
    int64_t& size = shape[shape.size() - d];
    if (size == 1) size = view.size(rank - d);
  }
  return true;
}

// The one way to refuse an argument: argument, expected, actual, and the operator from its entry.
[[noreturn]] inline void refuse(const std::string& argument, const std::string& expected,
                                const std::string& actual) {
  throw OpError("argument '" + argument + "': expected " + expected + ", got " + actual);
}

// A new tensor with explicit strides, uninitialized.
inline Tensor empty_strided(const int64_t* sizes, const int64_t* strides, int64_t dims, DType dtype,
                            DeviceId device) {
  AtenTensorHandle handle = nullptr;
  detail::check_torch(aoti_torch_empty_strided(dims, sizes, strides, detail::torch_code(dtype),
                                               device.type, device.index, &handle),
                      "allocate an output");
  return Tensor(handle);
}

// A new contiguous tensor on a device, uninitialized.
inline Tensor empty(const std::vector<int64_t>& sizes, DType dtype, DeviceId device) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= sizes[i] > 1 ? sizes[i] : 1;
  }
  return empty_strided(sizes.data(), strides.data(), static_cast<int64_t>(sizes.size()), dtype,
                       device);
}

// The same on the device that an argument says. An operator without a tensor argument always gets
// one, also where the caller passed None.
inline Tensor empty(const std::vector<int64_t>& sizes, DType dtype,
                    const std::optional<Device>& device) {
  if (!device) throw std::runtime_error("cuda_ops: empty() without a device");
  return empty(sizes, dtype, device_of(*device));
}

// The same on the device of `like`.
inline Tensor empty(const std::vector<int64_t>& sizes, DType dtype, const Tensor& like) {
  return empty(sizes, dtype, device_of(like));
}

inline Tensor empty(const std::vector<int64_t>& sizes, const Tensor& like) {
  return empty(sizes, dtype_of(like), like);
}

inline std::vector<int64_t> shape_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return {sizes.begin(), sizes.end()};
}

// From one index of a dim to the next, in elements; 0 where there is no next one.
inline int64_t step_of(const Tensor& tensor, int64_t dim) {
  return tensor.size(dim) == 1 ? 0 : tensor.stride(dim);
}

// `tensor`, broadcast to `shape` and contiguous: itself where it is that already, else a copy.
inline Tensor contiguous(const Tensor& tensor, const std::vector<int64_t>& shape) {
  if (tensor.is_contiguous() && shape_of(tensor) == shape) return tensor;
  Tensor copy = empty(shape, tensor);
  detail::check_torch(aoti_torch_copy_(copy.get(), tensor.get(), 0), "copy a tensor");
  return copy;
}

inline Tensor contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : contiguous(tensor, shape_of(tensor));
}

// `tensor`, contiguous and of `dtype`: itself where it is that already, else a copy.
inline Tensor contiguous_as(const Tensor& tensor, DType dtype) {
  if (dtype_of(tensor) == dtype) return contiguous(tensor);
  Tensor copy = empty(shape_of(tensor), dtype, tensor);
  detail::check_torch(aoti_torch_copy_(copy.get(), tensor.get(), 0), "copy a tensor");
  return copy;
}

}  // namespace cuda_ops
