// Elementwise operators, the binding's side: the output every input broadcasts
// to, the problem as plain numbers, and the loop that the CPU runs.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <exception>
#include <tuple>

#include "launch.h"
#include "narrow.h"
#include "strided.h"

namespace cuda_ops {
namespace detail {

// Every element of the storage span is used exactly once.
inline bool is_dense(const View& view) {
  std::pair<int64_t, int64_t> dims[kMaxDims];  // stride, size
  int count = 0;
  for (int d = 0; d < view.dims; ++d) {
    if (view.size(d) == 0) return true;
    if (view.size(d) == 1) continue;
    if (count == kMaxDims) return false;
    dims[count++] = {view.strides[d], view.size(d)};
  }
  std::sort(dims, dims + count);
  int64_t expected = 1;
  for (int d = 0; d < count; ++d) {
    if (dims[d].first != expected) return false;
    expected *= dims[d].second;
  }
  return true;
}

inline bool same_layout(const View& a, const View& b) {
  if (a.dims != b.dims) return false;
  for (int d = 0; d < a.dims; ++d) {
    if (a.size(d) != b.size(d) || a.strides[d] != b.strides[d]) return false;
  }
  return true;
}

}  // namespace detail

// The shape that the inputs broadcast to, their last `core_dims` left out. With a signature
// line Checks has refused what does not broadcast.
template <size_t N>
std::vector<int64_t> broadcast_shape(const View (&inputs)[N], int core_dims = 0) {
  std::vector<int64_t> shape;
  for (const View& input : inputs) {
    if (!broadcast(shape, input, input.dims - core_dims)) {
      throw OpError("shapes " + shape_name(inputs[0]) + " and " + shape_name(input) +
                    " do not broadcast");
    }
  }
  return shape;
}

// The output of an elementwise operator: the shape its inputs broadcast to.
// Where all inputs share one dense layout the output keeps it, as torch does
// (channels_last in, channels_last out); otherwise it is contiguous.
template <size_t N>
Tensor empty_elementwise(const View (&inputs)[N], const Tensor& like, DType dtype) {
  const View& first = inputs[0];
  bool alike = detail::is_dense(first);
  for (size_t k = 1; k < N; ++k) alike = alike && detail::same_layout(first, inputs[k]);
  if (alike) {
    return empty_strided(first.sizes, first.strides, first.dims, dtype, device_of(like));
  }
  return empty(broadcast_shape(inputs), dtype, like);
}

template <size_t N>
Tensor empty_elementwise(const View (&inputs)[N], const Tensor& like) {
  return empty_elementwise(inputs, like, inputs[0].dtype);
}

template <class... Inputs>
Tensor empty_elementwise(const Tensor& first, const Inputs&... rest) {
  const View inputs[] = {first, rest...};
  return empty_elementwise(inputs, first);
}

// The same in a dtype of its own, see Op::returns.
template <class... Inputs>
Tensor empty_elementwise(DType dtype, const Tensor& first, const Inputs&... rest) {
  const View inputs[] = {first, rest...};
  return empty_elementwise(inputs, first, dtype);
}

// The problem (outputs...) = f(inputs...), inputs broadcast to the outputs; the
// last `core_dims` of each are left out.
template <size_t Outputs, size_t Inputs>
Strided<Inputs, Outputs> strided(const View (&outputs)[Outputs], const View (&inputs)[Inputs],
                                 int core_dims = 0) {
  Strided<Inputs, Outputs> problem;
  const View& out = outputs[0];
  problem.dtype = out.dtype;
  problem.numel = 1;
  const auto operand = [&](size_t k) -> const View& {
    return k < Outputs ? outputs[k] : inputs[k - Outputs];
  };
  for (size_t k = 0; k < Outputs + Inputs; ++k) problem.operands[k].data = operand(k).data;
  for (int d = out.dims - core_dims - 1; d >= 0; --d) {
    const int64_t size = out.size(d);
    problem.numel *= size;
    if (size == 1) continue;
    if (problem.dims == kMaxDims) {
      throw OpError("expected at most " + std::to_string(kMaxDims) +
                    (core_dims > 0 ? " batch dims" : " dims") + " other than 1, got shape " +
                    shape_name(out));
    }
    problem.sizes[problem.dims] = size;
    for (size_t k = 0; k < Outputs + Inputs; ++k) {
      const View& view = operand(k);
      const int own = d - (out.dims - view.dims);
      const bool walks = own >= 0 && view.size(own) != 1;
      problem.operands[k].strides[problem.dims] = walks ? view.strides[own] : 0;
    }
    ++problem.dims;
  }
  problem.coalesce();
  return problem;
}

template <class... Inputs>
Strided<sizeof...(Inputs)> strided(const Tensor& out, const Inputs&... inputs) {
  return strided({writable_view(out)}, {View(inputs)...});
}

namespace detail {

// Calls body(offsets of the first point, number of points) for each part of a row of the fastest
// dim between the points `begin` and `end`.
template <int Inputs, int Outputs, class Body>
void for_each_row(const Strided<Inputs, Outputs>& problem, int64_t begin, int64_t end,
                  Body&& body) {
  const int64_t row = problem.dims > 0 ? problem.sizes[0] : 1;
  while (begin < end) {
    const int64_t count = std::min(row - begin % row, end - begin);
    body(problem.offsets_at(begin), count);
    begin += count;
  }
}

template <class T, int Inputs, int Outputs, class F, size_t... I>
void cpu_rows(const Strided<Inputs, Outputs>& problem, int64_t begin, int64_t end, const F& f,
              std::index_sequence<I...>) {
  const auto& operands = problem.operands;
  for_each_row(problem, begin, end, [&](const auto& first, int64_t count) {
    if constexpr (Outputs == 1) {
      if (((operands[0].strides[0] == 1) && ... && (operands[1 + I].strides[0] == 1))) {
        T* const out = static_cast<T*>(operands[0].data) + first[0];
        const T* const in[] = {static_cast<const T*>(operands[1 + I].data) + first[1 + I]...};
#pragma GCC ivdep  // an input may be the output; no other memory of both is shared
        for (int64_t i = 0; i < count; ++i) {
          out[i] = static_cast<T>(f(static_cast<double>(in[I][i])...));
        }
        return;
      }
    }
    const auto at = [&](size_t k, int64_t i) {
      return static_cast<T*>(operands[k].data) + first[k] + i * operands[k].strides[0];
    };
    for (int64_t i = 0; i < count; ++i) {
      const auto result = f(static_cast<double>(*at(Outputs + I, i))...);
      if constexpr (Outputs == 1) {
        *at(0, i) = static_cast<T>(result);
      } else {
        for (int k = 0; k < Outputs; ++k) *at(k, i) = static_cast<T>(result.values[k]);
      }
    }
  });
}

// Refuses, in a sentence, a function that the loop above cannot call; false for such a one, so that
// nothing else is said about it.
template <size_t> using Value = double;
template <class F, int Outputs, size_t... I>
constexpr bool check_function(std::index_sequence<I...>) {
  constexpr bool kTakes = std::is_invocable_v<const F&, Value<I>...>;
  static_assert(kTakes, "f takes one double for each tensor, and then the scalars");
  if constexpr (kTakes) {
    using Returned = std::invoke_result_t<const F&, Value<I>...>;
    constexpr int kGiven = kResultsIn<std::decay_t<Returned>>;
    static_assert(Outputs == 1 || kGiven == Outputs,
                  "two outputs: f returns Results<double, 2>{{first, second}}");
    static_assert(Outputs > 1 || kGiven == 1, "one output: f returns a number; for two write <2>");
    return kGiven == Outputs;
  }
  return false;
}

}  // namespace detail

// Runs body(begin, end) on torch's threads, for parts of 0 .. count of `grain` indices or more.
// The first exception comes out here; torch's C interface would drop its text.
template <class Body>
void parallel_for(int64_t count, int64_t grain, Body&& body) {
  struct Loop {
    std::remove_reference_t<Body>& body;
    std::atomic<bool> failed{false};
    std::exception_ptr error{};

    static void part(int64_t begin, int64_t end, void* self) {
      Loop& loop = *static_cast<Loop*>(self);
      try {
        loop.body(begin, end);
      } catch (...) {
        if (!loop.failed.exchange(true)) loop.error = std::current_exception();
      }
    }
  } loop{body};
  detail::check_torch(torch_parallel_for(0, count, grain, Loop::part, &loop),
                      "run a parallel loop");
  if (loop.error) std::rethrow_exception(loop.error);
}

// The type of an element in a CPU kernel.
template <DType kDType> struct CpuElement;
template <> struct CpuElement<DType::kFloat64> {
  using type = double;
};
template <> struct CpuElement<DType::kFloat32> {
  using type = float;
};
template <> struct CpuElement<DType::kFloat16> {
  using type = torch::headeronly::Half;
};
template <> struct CpuElement<DType::kBFloat16> {
  using type = torch::headeronly::BFloat16;
};
template <> struct CpuElement<DType::kFloat8E4M3> {
  using type = torch::headeronly::Float8_e4m3fn;
};
template <> struct CpuElement<DType::kFloat8E5M2> {
  using type = torch::headeronly::Float8_e5m2;
};
template <> struct CpuElement<DType::kFloat8E8M0> {
  using type = torch::headeronly::Float8_e8m0fnu;
};
template <> struct CpuElement<DType::kFloat4E2M1x2> {
  using type = Float4E2M1x2;
};
template <> struct CpuElement<DType::kUInt8> {
  using type = uint8_t;
};
template <> struct CpuElement<DType::kUInt16> {
  using type = uint16_t;
};
template <> struct CpuElement<DType::kUInt32> {
  using type = uint32_t;
};
template <> struct CpuElement<DType::kUInt64> {
  using type = uint64_t;
};
template <> struct CpuElement<DType::kInt8> {
  using type = int8_t;
};
template <> struct CpuElement<DType::kInt16> {
  using type = int16_t;
};
template <> struct CpuElement<DType::kInt32> {
  using type = int32_t;
};
template <> struct CpuElement<DType::kInt64> {
  using type = int64_t;
};
template <> struct CpuElement<DType::kBool> {
  using type = bool;
};
template <> struct CpuElement<DType::kComplex64> {
  using type = torch::headeronly::complex<float>;
};
template <> struct CpuElement<DType::kComplex128> {
  using type = torch::headeronly::complex<double>;
};

// Calls `body(T{})` with the CPU kernel's type of `dtype`, one of those listed.
template <DType... kListed, class Body>
void visit_cpu(DType dtype, Body&& body) {
  const auto found = [&](auto tag) {
    body(tag);
    return true;
  };
  if (!((dtype == kListed && found(typename CpuElement<kListed>::type{})) || ...)) {
    throw std::runtime_error(std::string("cuda_ops: no CPU kernel for ") + name(dtype));
  }
}

// The same for the dtypes of kFloating.
template <class Body>
void visit_floating_cpu(DType dtype, Body&& body) {
  visit_cpu<DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16>(dtype, body);
}

// (out[i], ...) = f(in[i]...), computed in float64 whatever the dtype: the CPU
// kernel is also the reference that the CUDA kernel is compared with. `f` takes
// doubles and returns a double, or Results<double, Outputs>.
template <int Inputs, int Outputs, class F>
void map_cpu(const Strided<Inputs, Outputs>& problem, F f) {
  if constexpr (detail::check_function<F, Outputs>(std::make_index_sequence<Inputs>{})) {
    constexpr int64_t kGrain = 16384;
    visit_floating_cpu(problem.dtype, [&](auto tag) {
      using T = decltype(tag);
      parallel_for(problem.numel, kGrain, [&](int64_t begin, int64_t end) {
        detail::cpu_rows<T>(problem, begin, end, f, std::make_index_sequence<Inputs>{});
      });
    });
  }
}

inline double sigmoid(double v) { return 1 / (1 + std::exp(-v)); }

namespace detail {

// `arg` as a tuple of one, or of none where it is not wanted.
template <bool kTensors, class Arg>
auto only(const Arg& arg) {
  if constexpr (std::is_same_v<Arg, Tensor> == kTensors) {
    return std::tuple<const Arg&>(arg);
  } else {
    return std::tuple<>();
  }
}

// Allocates the outputs and calls `run(problem, scalars...)`.
template <int Outputs, class Run, class... Args>
auto elementwise(Run run, const Args&... args) {
  const auto scalars = std::tuple_cat(only<false>(args)...);
  return std::apply(
      [&](const Tensor& first, const auto&... rest) {
        const View inputs[] = {first, rest...};
        const auto run_on = [&](const auto& problem) {
          std::apply([&](const auto&... scalar) { run(problem, scalar...); }, scalars);
        };
        if constexpr (Outputs == 1) {
          Tensor out = empty_elementwise(inputs, first);
          run_on(strided({writable_view(out)}, inputs));
          return out;
        } else {
          static_assert(Outputs == 2, "one output or two");
          std::tuple<Tensor, Tensor> out{empty_elementwise(inputs, first),
                                         empty_elementwise(inputs, first)};
          run_on(
              strided({writable_view(std::get<0>(out)), writable_view(std::get<1>(out))}, inputs));
          return out;
        }
      },
      std::tuple_cat(only<true>(args)...));
}

template <class Launcher, class Problem, class... Scalars>
void run_launcher(const Tensor& tensor, Launcher launcher, const Problem& problem,
                  const Scalars&... scalars) {
  constexpr bool kTakes =
      std::is_invocable_v<Launcher, const Problem&, const Scalars&..., cudaStream_t>;
  static_assert(kTakes, "the launcher takes the Strided problem, then the scalars and the stream");
  if constexpr (kTakes) {
    launch(tensor, [&](cudaStream_t stream) { return launcher(problem, scalars..., stream); });
  }
}

template <class Run, class... Args>
void write_elementwise(const Tensor& out, Run run, const Args&... args) {
  const auto scalars = std::tuple_cat(only<false>(args)...);
  std::apply(
      [&](const auto&... tensors) {
        const auto problem = strided({writable_view(out)}, {View(tensors)...});
        std::apply([&](const auto&... scalar) { run(problem, scalar...); }, scalars);
      },
      std::tuple_cat(only<true>(args)...));
}

}  // namespace detail

// The whole CPU entry of an elementwise operator: allocates the outputs and fills them with
// `f(values..., scalars...)`. `args` are the operator's: tensors, and scalars to pass on.
template <int Outputs = 1, class F, class... Args>
auto elementwise_cpu(F f, const Args&... args) {
  const auto run = [&](const auto& problem, const auto&... scalars) {
    map_cpu(problem, [&](auto... values) -> decltype(f(values..., scalars...)) {
      return f(values..., scalars...);
    });
  };
  return detail::elementwise<Outputs>(run, args...);
}

// The whole CUDA entry: allocates the outputs and calls `launcher(problem, scalars..., stream)`
// with the right device and stream.
template <int Outputs = 1, class Launcher, class... Args>
auto elementwise_cuda(Launcher launcher, const Args&... args) {
  const Tensor& first = std::get<0>(std::tuple_cat(detail::only<true>(args)...));
  const auto run = [&](const auto& problem, const auto&... scalars) {
    detail::run_launcher(first, launcher, problem, scalars...);
  };
  return detail::elementwise<Outputs>(run, args...);
}

// The same into a tensor that the operator writes: out = f(values..., scalars...). `out` may be
// among `args`; it has the shape that they broadcast to.
template <class F, class... Args>
void write_elementwise_cpu(const Tensor& out, F f, const Args&... args) {
  const auto run = [&](const auto& problem, const auto&... scalars) {
    map_cpu(problem, [&](auto... values) -> decltype(f(values..., scalars...)) {
      return f(values..., scalars...);
    });
  };
  detail::write_elementwise(out, run, args...);
}

template <class Launcher, class... Args>
void write_elementwise_cuda(const Tensor& out, Launcher launcher, const Args&... args) {
  const auto run = [&](const auto& problem, const auto&... scalars) {
    detail::run_launcher(out, launcher, problem, scalars...);
  };
  detail::write_elementwise(out, run, args...);
}

}  // namespace cuda_ops
