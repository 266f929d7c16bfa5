// foreach_axpy(xs, ys, alpha): alpha * x + y for each x and y of two lists.
#include "binding.h"
#include "foreach/foreach_binding.h"

using namespace cuda_ops;

cudaError_t foreach_axpy_launch(const Flat<2>* flats, int64_t count, DType dtype, double alpha,
                                cudaStream_t stream);

namespace {

// Calls run(flats, count, dtype) to compute new tensors.
template <class Run>
Tensors sums(const Tensors& xs, const Tensors& ys, Run run) {
  check_pairs("xs", xs, "ys", ys);
  Tensors outs;
  for (size_t i = 0; i < xs.size(); ++i) outs.push_back(empty_elementwise(xs[i], ys[i]));
  foreach_flat(outs, {&xs, &ys}, run);
  return outs;
}

// The same into `ys`. What is not dense is summed in a copy, and copied back.
template <class Run>
void add_to(const Tensors& xs, const Tensors& ys, Run run) {
  check_pairs("xs", xs, "ys", ys);
  Tensors dense;
  for (const Tensor& y : ys) dense.push_back(detail::is_dense(y) ? y : contiguous(y));
  foreach_flat(dense, {&xs, &dense}, run);
  for (size_t i = 0; i < ys.size(); ++i) {
    if (dense[i].get() == ys[i].get()) continue;
    detail::check_torch(aoti_torch_copy_(ys[i].get(), dense[i].get(), 0), "copy a tensor");
  }
}

auto on_cpu(double alpha) {
  return [alpha](const Flat<2>* flats, int64_t count, DType dtype) {
    foreach_cpu(flats, count, dtype, [alpha](double x, double y) { return alpha * x + y; });
  };
}

auto on_cuda(const Tensors& like, double alpha) {
  return [&like, alpha](const Flat<2>* flats, int64_t count, DType dtype) {
    launch(like[0], [&](cudaStream_t stream) {
      return foreach_axpy_launch(flats, count, dtype, alpha, stream);
    });
  };
}

Tensors foreach_axpy_cpu(const Tensors& xs, const Tensors& ys, double alpha) {
  return sums(xs, ys, on_cpu(alpha));
}

Tensors foreach_axpy_cuda(const Tensors& xs, const Tensors& ys, double alpha) {
  return sums(xs, ys, on_cuda(xs, alpha));
}

void write_cpu(const Tensors& xs, const Tensors& ys, double alpha) {
  add_to(xs, ys, on_cpu(alpha));
}

void write_cuda(const Tensors& xs, const Tensors& ys, double alpha) {
  add_to(xs, ys, on_cuda(xs, alpha));
}

}  // namespace

CUDA_OPS(library) {
  library.op("foreach_axpy(Tensor[] xs, Tensor[] ys, float alpha=1.0) -> Tensor[]", "")
      .doc(R"(alpha * x + y for each x and y of two lists, in one launch for many tensors.

A launch takes up to 111 tensors of one dtype, of any sizes. The gradient of each x is alpha times
that of its result, which is the gradient of its y.

Shapes: x and y of a pair have the same shape and any strides; their result has it too, and their
layout if both have the same dense one, else it is contiguous. A tensor in another layout than its
result is copied first. Lists are as long as each other, and hold at least one tensor.
Dtypes: float64, float32, float16 or bfloat16, the same for x and y of a pair; pairs may differ.
Sums run in float32, in float64 for float64, and are rounded once.
Errors: RuntimeError for lists of different lengths, a pair of different shapes or dtypes, any other
dtype, or mixed devices.
Formula: out[i] = alpha xs[i] + ys[i], as torch._foreach_add(ys, xs, alpha=alpha).

Example:
>>> cuda_ops.foreach_axpy([torch.ones(2), torch.ones(1)], [torch.zeros(2), torch.ones(1)], 3.0)
[tensor([3., 3.]), tensor([4.])])")
      .cpu<foreach_axpy_cpu>()
      .cuda<foreach_axpy_cuda>();
  library.op("foreach_axpy_(Tensor[] xs, Tensor(a!)[] ys, float alpha=1.0) -> ()", "")
      .doc(R"(Adds alpha * x to y in place for each x and y of two lists: what an optimizer does.

Shapes: as for foreach_axpy; a y that is not dense is copied, and copied back.
Dtypes: as for foreach_axpy.
Errors: as for foreach_axpy, and for a y that requires a gradient or shares memory with another y.
Formula: ys[i] += alpha xs[i], as torch._foreach_add_(ys, xs, alpha=alpha).)")
      .cpu<write_cpu>()
      .cuda<write_cuda>();
}
