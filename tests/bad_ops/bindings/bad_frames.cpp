// Class 13: the fake rounds a number of frames up; the samples of the plugin divide evenly.
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_frames_cpu(const Tensor& x_) {
  const Tensor x = contiguous(x_);
  if (x.dim() != 1 || x.numel() < 1) refuse("x", "one dim", "shape " + shape_name(View(x)));
  Tensor out = empty({x.numel() / 2, 2}, x);
  visit_raw(raw(out, x),
            [&](auto* in, auto* result, int64_t) { std::copy(in, in + out.numel(), result); });
  return out;
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_frames(Tensor x) -> Tensor", "").dtypes(kWide).cpu<bad_frames_cpu>();
}
