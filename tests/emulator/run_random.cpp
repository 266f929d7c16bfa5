// The draw of each element on every path of the elementwise kernels, for dense and strided
// problems, whole and split: it must be that of the element's index in the order of the dims.
#include "cases.h"

#include "random.cuh"

using namespace emulator;
using namespace cuda_ops;

namespace {

// Below 2^8, so that every dtype holds it.
struct Numbers {
  template <class C>
  C operator()(const Draw& draw, C x) const {
    return C(draw.below(256)) + x;
  }
};
using F = cuda_ops::detail::Randomized<Numbers>;

int launches_by_path[ElementwiseConfig::kPaths];

// Runs the kernel that this address belongs to, if it is one for T.
template <class T>
bool run_if(const void* kernel, unsigned blocks, void** arguments) {
  const auto flat = [&](auto* f, int path) {
    if (reinterpret_cast<const void*>(f) != kernel) return false;
    ++launches_by_path[path];
    launch(blocks, kElementwiseThreads, 0, nullptr, [=] {
      f(*static_cast<Pointers<2, 1>*>(arguments[0]), *static_cast<uint64_t*>(arguments[1]),
        *static_cast<F*>(arguments[2]));
    });
    return true;
  };
  const auto strided = [&](auto* f, int path) {
    if (reinterpret_cast<const void*>(f) != kernel) return false;
    ++launches_by_path[path];
    launch(blocks, kElementwiseThreads, 0, nullptr,
           [=] { f(*static_cast<Walk<2, 1>*>(arguments[0]), *static_cast<F*>(arguments[1])); });
    return true;
  };
  return flat(flat_kernel<kPackBytes, T, 2, 1, F>, ElementwiseConfig::kFlat) ||
         flat(flat_kernel<small_pack_bytes(sizeof(T)), T, 2, 1, F>, ElementwiseConfig::kSmall) ||
         strided(strided_kernel<kPackBytes, T, 2, 1, F>, ElementwiseConfig::kRows) ||
         strided(strided_kernel<sizeof(T), T, 2, 1, F>, ElementwiseConfig::kPoints);
}

struct Shape {
  std::vector<int64_t> sizes, strides;
};

// `start` elements behind a multiple of 16 bytes.
void run_random(DType dtype, const Shape& shape, int64_t start, bool split) {
  const int64_t dims = int64_t(shape.sizes.size()), bytes = size_of(dtype);
  int64_t numel = 1, span = 1;
  for (int64_t d = 0; d < dims; ++d) {
    numel *= shape.sizes[d];
    span += (shape.sizes[d] - 1) * shape.strides[d];
  }
  const Tensor x(dtype, size_t(start + span)), out(dtype, size_t(start + span));
  for (int64_t i = 0; i < start + span; ++i) x.set(size_t(i), 0);
  Strided<2> problem;
  problem.dtype = dtype;
  problem.numel = numel;
  problem.operands[0].data = static_cast<char*>(out.data()) + start * bytes;
  problem.operands[1].data = static_cast<char*>(x.data()) + start * bytes;
  int64_t index = 1;
  for (int64_t d = dims - 1; d >= 0; --d) {
    problem.sizes[problem.dims] = shape.sizes[d];
    problem.operands[0].strides[problem.dims] = shape.strides[d];
    problem.operands[1].strides[problem.dims] = shape.strides[d];
    problem.operands[2].strides[problem.dims++] = index;
    index *= shape.sizes[d];
  }
  problem.coalesce();
  const int64_t numbers[] = {0x1234567890abcdef, -77};
  const RandomKey key{numbers, 1};
  if (split) check(map_random_cuda(problem.split(), key, nullptr, Numbers{}), "launch");
  check(map_random_cuda(problem, key, nullptr, Numbers{}), "launch");
  const Random random(key);
  for (int64_t i = 0; i < numel; ++i) {
    int64_t rest = i, at = start;
    for (int64_t d = dims - 1; d >= 0; --d) {
      at += rest % shape.sizes[d] * shape.strides[d];
      rest /= shape.sizes[d];
    }
    const double wanted = random.at(uint64_t(i)).below(256);
    if (out.get(size_t(at)) == wanted) continue;
    std::printf("%s of %lld elements from %lld on%s: element %lld is %g, wanted %g\n", name(dtype),
                static_cast<long long>(numel), static_cast<long long>(start),
                split ? ", split" : "", static_cast<long long>(i), out.get(size_t(at)), wanted);
    std::exit(1);
  }
}

}  // namespace

extern "C" cudaError_t cudaLaunchKernel(const void* kernel, dim3 blocks, dim3, void** arguments,
                                        size_t, cudaStream_t) {
  const bool ran =
      run_if<double>(kernel, blocks.x, arguments) || run_if<float>(kernel, blocks.x, arguments) ||
      run_if<Half>(kernel, blocks.x, arguments) || run_if<BFloat16>(kernel, blocks.x, arguments);
  return ran ? cudaSuccess : cudaErrorInvalidDeviceFunction;
}

int main(int count, char** texts) {
  const Arguments arguments(count, texts);
  const Shape shapes[] = {
      {{1}, {1}},
      {{7}, {1}},
      {{1003}, {1}},
      {{20001}, {1}},
      {{100, 64}, {80, 1}},
      {{64, 48}, {1, 64}},
      {{33, 31}, {62, 2}},
      {{2, 8, 5, 6}, {240, 1, 48, 8}},
      {{3, 4, 8}, {64, 16, 1}},
      {{3, 5, 7}, {40, 8, 1}},
      {{4, 6, 16}, {1000, 24, 1}},
  };
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const Shape& shape : shapes) {
      for (const int64_t start : {0, 1, 4, 8}) {
        run_random(dtype, shape, start, false);
        if (shape.sizes[0] > 1) run_random(dtype, shape, start, true);
      }
    }
  }
  for (const int launched : launches_by_path) {
    if (launched == 0) fail("a path was not run");
  }
}
