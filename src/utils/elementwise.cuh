// Elementwise operators, the kernel's side: (out[i], ...) = f(in[i]...) for one
// Strided problem. Bound by memory at every size worth tuning, so the design
// is about bytes: wide accesses, and enough of them in flight.
#pragma once

#include <climits>
#include <type_traits>
#include <utility>

#include "dtype.cuh"
#include "math.cuh"
#include "strided.h"

namespace cuda_ops {

// --- the launch configuration: a value, chosen without a GPU ------------------

// 128 threads and one 16-byte access per input each: at full occupancy 32 KiB
// per SM are in flight, where hiding 700 ns at 4.8 TB/s takes 25 KiB. Larger
// tiles only leave SMs idle at the end (H200, 2026-11-21: four accesses of 256
// threads take 4 % longer for 256M float32 elements and 41 % for 32K).
// docs/kernels/elementwise.md has the table.
constexpr int kElementwiseThreads = 128;
constexpr int kPackBytes = 16;
// Small tensors are cut into packs of 4 bytes instead: more threads with less to do one after the
// other. Small is up to kSmallBytes a tensor, and kSmallBytesLong for functors whose member kLong
// says that their arithmetic takes longer than an access.
constexpr int kSmallPackBytes = 4;
constexpr int64_t kSmallBytes = int64_t(1) << 15, kSmallBytesLong = int64_t(1) << 17;
template <class F, class = void>
constexpr int64_t kSmallBytesOf = kSmallBytes;
template <class F>
constexpr int64_t kSmallBytesOf<F, std::enable_if_t<F::kLong>> = kSmallBytesLong;
constexpr int small_pack_bytes(int element_bytes) {
  return element_bytes > kSmallPackBytes ? element_bytes : kSmallPackBytes;
}

// Accesses per input that one strided thread issues before it uses any: scalar
// ones need four to have as much in flight.
constexpr int strided_unroll(int bytes) { return bytes < kPackBytes ? 4 : 1; }

struct ElementwiseConfig {
  // kFlat: the index is the offset, 16-byte accesses. kSmall: the same with 4-byte
  // ones. kRows: the index is taken apart, 16-byte accesses along the fastest dim.
  // kPoints: one by one.
  enum Path { kFlat, kSmall, kRows, kPoints, kPaths } path = kFlat;
  int unroll = 1;
  int64_t tile = 0;  // elements per block
  int64_t blocks = 0;
};

constexpr bool is_flat(ElementwiseConfig::Path path) { return path < ElementwiseConfig::kRows; }

// Whether packs of `pack` elements along the fastest dim are whole and aligned.
// An input that is the same all along that dim is read as one element instead.
template <int Inputs, int Outputs>
bool has_packed_rows(const Strided<Inputs, Outputs>& problem, int pack) {
  if (problem.dims == 0 || problem.sizes[0] % pack != 0) return false;
  for (int k = 0; k < problem.kOperands; ++k) {
    const Operand& operand = problem.operands[k];
    if (k >= Outputs && operand.strides[0] == 0) continue;
    if (operand.strides[0] != 1) return false;
    if (!is_aligned(operand.data, kPackBytes)) return false;
    for (int d = 1; d < problem.dims; ++d) {
      if (operand.strides[d] % pack != 0) return false;
    }
  }
  return true;
}

// One tile per block. 2^31 blocks hold 2^41 elements on the flat path; the others
// get at most 2^31 elements at a time.
template <int Inputs, int Outputs>
ElementwiseConfig elementwise_config(const Strided<Inputs, Outputs>& problem, int element_bytes,
                                     int64_t small = kSmallBytes) {
  using Config = ElementwiseConfig;
  const int pack = kPackBytes / element_bytes;
  bool aligned = true;
  for (const Operand& operand : problem.operands) {
    aligned = aligned && is_aligned(operand.data, kPackBytes);
  }
  Config config;
  const auto flat = problem.numel * element_bytes <= small ? Config::kSmall : Config::kFlat;
  config.path = aligned && problem.is_flat()     ? flat
                : has_packed_rows(problem, pack) ? Config::kRows
                                                 : Config::kPoints;
  const int bytes = config.path == Config::kSmall    ? small_pack_bytes(element_bytes)
                    : config.path == Config::kPoints ? element_bytes
                                                     : kPackBytes;
  config.unroll = is_flat(config.path) ? 1 : strided_unroll(bytes);
  config.tile = int64_t(kElementwiseThreads) * (bytes / element_bytes) * config.unroll;
  config.blocks = (problem.numel + config.tile - 1) / config.tile;
  return config;
}

// --- one point ----------------------------------------------------------------

template <class T, int kBytes>
struct alignas(kBytes) Pack {
  static constexpr int kSize = kBytes / int(sizeof(T));
  T values[kSize];
};

template <int Inputs, int Outputs>
struct Pointers {
  void* out[Outputs];
  const void* in[Inputs];

  explicit Pointers(const Strided<Inputs, Outputs>& problem) {
    for (int k = 0; k < Outputs; ++k) out[k] = problem.operands[k].data;
    for (int k = 0; k < Inputs; ++k) in[k] = problem.input(k).data;
  }
};

// A number for functors of every dtype: converting a float64 takes a thread longer than the rest of
// its arithmetic.
struct Scalar {
  double wide;
  float narrow;

  Scalar(double value) : wide(value), narrow(float(value)) {}

  template <class C>
  __device__ C as() const {
    if constexpr (sizeof(C) == sizeof(double)) return wide;
    return narrow;
  }
};

// A functor with a member kIndexed takes the index of each element too. The last input of its
// problem is the index: an operand of no memory, whose address and strides count elements.
template <class F, class = void>
constexpr bool kIsIndexed = false;
template <class F>
constexpr bool kIsIndexed<F, std::enable_if_t<F::kIndexed>> = true;
// The inputs that are read.
template <class F>
constexpr int read_of(int inputs) {
  return inputs - kIsIndexed<F>;
}

template <class C, int Inputs, int Outputs, class F, size_t... I>
__device__ void apply(const F& f, const C (&in)[Inputs], C (&out)[Outputs],
                      std::index_sequence<I...>) {
  constexpr bool kTakes = std::is_invocable_v<const F&, decltype(in[I])...>;
  static_assert(kTakes, "f takes one value for each tensor");
  if constexpr (kTakes) {
    const auto result = f(in[I]...);
    constexpr int kGiven = kResultsIn<std::decay_t<decltype(result)>>;
    static_assert(Outputs == 1 || kGiven == Outputs,
                  "two outputs: f returns Results<C, 2>{{first, second}}");
    static_assert(Outputs > 1 || kGiven == 1, "one output: f returns a number");
    if constexpr (Outputs == 1 && kGiven == 1) {
      out[0] = result;
    } else if constexpr (kGiven == Outputs) {
#pragma unroll
      for (int k = 0; k < Outputs; ++k) out[k] = result.values[k];
    }
  }
}

// Applies f to each element of one pack per input. Elements of two bytes are taken apart and put
// together in pairs: half the instructions, which bound bfloat16 chains of a few exponentials.
template <class T, int kBytes, int Inputs, int Outputs, class F>
__device__ void apply(const F& f, const Pack<T, kBytes> (&in)[Inputs],
                      Pack<T, kBytes> (&out)[Outputs]) {
  using C = compute_t<T>;
  constexpr auto kInputs = std::make_index_sequence<Inputs>{};
  constexpr int kTogether = sizeof(T) == 2 && kBytes > 2 ? 2 : 1;
#pragma unroll
  for (int v = 0; v < Pack<T, kBytes>::kSize; v += kTogether) {
    C values[kTogether][Inputs], results[kTogether][Outputs];
#pragma unroll
    for (int k = 0; k < Inputs; ++k) {
      if constexpr (kTogether == 2) {
        C both[2];
        to_compute(reinterpret_cast<const uint32_t*>(in[k].values)[v / 2], T{}, both);
        values[0][k] = both[0];
        values[1][k] = both[1];
      } else {
        values[0][k] = to_compute(in[k].values[v]);
      }
    }
#pragma unroll
    for (int t = 0; t < kTogether; ++t) apply(f, values[t], results[t], kInputs);
#pragma unroll
    for (int k = 0; k < Outputs; ++k) {
      if constexpr (kTogether == 2) {
        reinterpret_cast<uint32_t*>(out[k].values)[v / 2] =
            from_compute(results[0][k], results[1][k], T{});
      } else {
        out[k].values[v] = from_compute<T>(results[0][k]);
      }
    }
  }
}

// The same for the elements from `offset` on in every operand, or where the index says.
template <class T, int kBytes, int Read, int Inputs, int Outputs, class F>
__device__ void apply_at(const Pointers<Inputs, Outputs>& pointers, uint64_t offset, const F& f,
                         const Pack<T, kBytes> (&in)[Read], Pack<T, kBytes> (&out)[Outputs]) {
  if constexpr (kIsIndexed<F>) {
    f.apply(reinterpret_cast<uintptr_t>(pointers.in[Read]) / sizeof(T) + offset, in, out);
  } else {
    apply(f, in, out);
  }
}

// --- flat: the index is the offset --------------------------------------------

// Short, because small tensors take as long as it takes to fetch the first
// instructions and to get to the first load.
template <int kBytes, class T, int Inputs, int Outputs, class F>
__global__ void __launch_bounds__(kElementwiseThreads)
    flat_kernel(Pointers<Inputs, Outputs> pointers, uint64_t numel, F f) {
  using P = Pack<T, kBytes>;
  using Index = std::conditional_t<kBytes == kPackBytes, uint64_t, uint32_t>;
  const Index packs = Index(numel) / P::kSize;
  const Index at = Index(blockIdx.x) * kElementwiseThreads + threadIdx.x;
  constexpr int kRead = read_of<F>(Inputs);
  if (at < packs) {
    P in[kRead], out[Outputs];
#pragma unroll
    for (int k = 0; k < kRead; ++k) in[k] = static_cast<const P*>(pointers.in[k])[at];
    apply_at(pointers, uint64_t(at) * P::kSize, f, in, out);
#pragma unroll
    for (int k = 0; k < Outputs; ++k) static_cast<P*>(pointers.out[k])[at] = out[k];
  }

  // One thread takes the rest, less than a pack, so that the others have nothing to do here.
  if (P::kSize == 1 || at != packs) return;
  const int left = int(numel % P::kSize);
  P in[kRead] = {}, out[Outputs];
#pragma unroll
  for (int k = 0; k < kRead; ++k) {
#pragma unroll
    for (int v = 0; v < P::kSize - 1; ++v) {
      if (v < left) in[k].values[v] = static_cast<const T*>(pointers.in[k])[at * P::kSize + v];
    }
  }
  apply_at(pointers, uint64_t(at) * P::kSize, f, in, out);
#pragma unroll
  for (int k = 0; k < Outputs; ++k) {
#pragma unroll
    for (int v = 0; v < P::kSize - 1; ++v) {
      if (v < left) static_cast<T*>(pointers.out[k])[at * P::kSize + v] = out[k].values[v];
    }
  }
}

// --- strided: the index is taken apart, dim by dim ----------------------------

// n / divisor for n < 2^31 without a division: with m = 2^32 (2^s - d) / d + 1
// and 2^s >= d it is (umulhi(n, m) + n) >> s (Granlund and Montgomery, 1994).
struct Divider {
  uint32_t divisor = 1, multiplier = 1, shift = 0;

  Divider() = default;
  explicit Divider(uint32_t d) : divisor(d) {
    while ((uint64_t(1) << shift) < d) ++shift;
    multiplier = uint32_t((uint64_t(1) << 32) * ((uint64_t(1) << shift) - d) / d + 1);
  }
  __device__ uint32_t operator()(uint32_t n) const {
    return (__umulhi(n, multiplier) + n) >> shift;
  }
};

// A walk over packs of `pack` elements along the fastest dim. Strides are in
// elements all the same.
template <int Inputs, int Outputs>
struct Walk {
  Pointers<Inputs, Outputs> pointers;
  uint32_t packs;
  int dims;
  uint32_t same_along_pack = 0;  // bit k: input k has stride 0 there
  // Parameters that are used together lie side by side: each line of them is a cache miss for a
  // kernel that has just started.
  struct Dim {
    Divider size;
    uint32_t strides[Outputs + Inputs];
  } by_dim[kMaxDims];

  Walk(const Strided<Inputs, Outputs>& problem, int pack)
      : pointers(problem), packs(uint32_t(problem.numel / pack)), dims(problem.dims) {
    for (int d = 0; d < dims; ++d) {
      const int step = d == 0 ? pack : 1;
      by_dim[d].size = Divider(uint32_t(problem.sizes[d] / step));
      for (int k = 0; k < problem.kOperands; ++k) {
        by_dim[d].strides[k] = uint32_t(problem.operands[k].strides[d] * step);
      }
    }
    for (int k = 0; k < Inputs; ++k) {
      if (dims > 0 && problem.input(k).strides[0] == 0) same_along_pack |= 1u << k;
    }
  }
};

template <int kBytes, class T, int Inputs, int Outputs, class F>
__global__ void __launch_bounds__(kElementwiseThreads)
    strided_kernel(const __grid_constant__ Walk<Inputs, Outputs> walk, F f) {
  using P = Pack<T, kBytes>;
  constexpr int kUnroll = strided_unroll(kBytes);
  constexpr int kTile = kElementwiseThreads * kUnroll;
  const uint32_t first = blockIdx.x * kTile + threadIdx.x;
  uint32_t rest[kUnroll];
  uint32_t offsets[kUnroll][Outputs + Inputs] = {};
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    // Past the end the last pack is loaded once more, and not stored.
    rest[u] = min(first + u * kElementwiseThreads, walk.packs - 1);
  }
#pragma unroll 1
  for (int d = 0; d < walk.dims; ++d) {
    const auto& dim = walk.by_dim[d];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const uint32_t above = d < walk.dims - 1 ? dim.size(rest[u]) : 0;
      const uint32_t i = rest[u] - above * dim.size.divisor;
      rest[u] = above;
#pragma unroll
      for (int k = 0; k < Outputs + Inputs; ++k) offsets[u][k] += i * dim.strides[k];
    }
  }
  constexpr int kRead = read_of<F>(Inputs);
  P in[kUnroll][kRead];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
    for (int k = 0; k < kRead; ++k) {
      const T* at = static_cast<const T*>(walk.pointers.in[k]) + offsets[u][Outputs + k];
      if (P::kSize > 1 && (walk.same_along_pack >> k & 1)) {
        const T value = *at;
#pragma unroll
        for (int v = 0; v < P::kSize; ++v) in[u][k].values[v] = value;
      } else {
        in[u][k] = *reinterpret_cast<const P*>(at);
      }
    }
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (first + u * kElementwiseThreads >= walk.packs) break;
    P out[Outputs];
    apply_at(walk.pointers, offsets[u][Outputs + Inputs - 1], f, in[u], out);
#pragma unroll
    for (int k = 0; k < Outputs; ++k) {
      T* at = static_cast<T*>(walk.pointers.out[k]) + offsets[u][k];
      *reinterpret_cast<P*>(at) = out[k];
    }
  }
}

// --- launchers ----------------------------------------------------------------

// The kernels of one dtype, by address: everything below is compiled once per number of operands,
// not once per dtype and function.
struct ElementwiseKernels {
  const void* by_path[ElementwiseConfig::kPaths] = {};  // indexed by ElementwiseConfig::Path
  int element_bytes = 0;
  int64_t small_bytes = kSmallBytes;
};

template <int Inputs, int Outputs>
cudaError_t launch_elementwise(Strided<Inputs, Outputs> problem, const ElementwiseKernels& kernels,
                               void* f, cudaStream_t stream) {
  const ElementwiseConfig config =
      elementwise_config(problem, kernels.element_bytes, kernels.small_bytes);
  if (!is_flat(config.path) && !problem.fits(INT32_MAX)) {
    // 64-bit division would cost 100 instructions per dim and element. Two
    // halves with 32-bit indices cost one more launch.
    Strided<Inputs, Outputs> upper = problem.split();
    const cudaError_t error = launch_elementwise(problem, kernels, f, stream);
    return error != cudaSuccess ? error : launch_elementwise(upper, kernels, f, stream);
  }
  const void* kernel = kernels.by_path[config.path];
  const dim3 blocks(static_cast<unsigned>(config.blocks)), threads(kElementwiseThreads);
  if (is_flat(config.path)) {
    Pointers<Inputs, Outputs> pointers(problem);
    void* arguments[] = {&pointers, &problem.numel, f};
    return cudaLaunchKernel(kernel, blocks, threads, arguments, 0, stream);
  }
  const bool rows = config.path == ElementwiseConfig::kRows;
  Walk<Inputs, Outputs> walk(problem, rows ? kPackBytes / kernels.element_bytes : 1);
  void* arguments[] = {&walk, f};
  return cudaLaunchKernel(kernel, blocks, threads, arguments, 0, stream);
}

namespace detail {

// `functor_for(tag)` is the functor of a dtype's elements.
template <int Inputs, int Outputs, class FunctorFor>
cudaError_t map_cuda(const Strided<Inputs, Outputs>& problem, cudaStream_t stream,
                     FunctorFor functor_for) {
  if (problem.numel == 0) return cudaSuccess;
  return visit_floating(problem.dtype, [&](auto tag) {
    using T = decltype(tag);
    auto f = functor_for(tag);
    using F = decltype(f);
    auto* flat = flat_kernel<kPackBytes, T, Inputs, Outputs, F>;
    auto* small = flat_kernel<small_pack_bytes(sizeof(T)), T, Inputs, Outputs, F>;
    auto* rows = strided_kernel<kPackBytes, T, Inputs, Outputs, F>;
    auto* points = strided_kernel<sizeof(T), T, Inputs, Outputs, F>;
    const ElementwiseKernels kernels{
        {reinterpret_cast<const void*>(flat), reinterpret_cast<const void*>(small),
         reinterpret_cast<const void*>(rows), reinterpret_cast<const void*>(points)},
        sizeof(T),
        kSmallBytesOf<F>};
    return launch_elementwise(problem, kernels, &f, stream);
  });
}

}  // namespace detail

// (out[i], ...) = f(in[i]...) on the device. `f` takes compute types and returns
// one, or Results of them.
template <int Inputs, int Outputs, class F>
cudaError_t map_cuda(const Strided<Inputs, Outputs>& problem, cudaStream_t stream, F f) {
  return detail::map_cuda(problem, stream, [&](auto) { return f; });
}

// The same with F<MathFor<dtype>>{}, for functors that need an exponential.
template <template <class> class F, int Inputs, int Outputs>
cudaError_t map_cuda(const Strided<Inputs, Outputs>& problem, cudaStream_t stream) {
  return detail::map_cuda(problem, stream, [](auto tag) { return F<MathFor<decltype(tag)>>{}; });
}

}  // namespace cuda_ops
