// alpha * x + y for lists of tensors, against the same in double.
#include "cases.h"

#include <memory>

#include "foreach_axpy.cu"

using namespace cuda_ops;
using namespace emulator;

int main(int count, char** texts) {
  const Arguments arguments(count, texts);
  const DType dtype = dtype_named(arguments.text("dtype"));
  const int tensors = arguments.number("tensors"), most = arguments.number("most");
  const int start = arguments.number("start");  // elements before each of every third tensor's x
  const bool in_place = arguments.number("in_place") != 0;
  std::mt19937 numbers(unsigned(arguments.number("seed")));
  std::vector<std::unique_ptr<Tensor>> kept;
  std::vector<Flat<2>> flats;
  std::vector<std::vector<double>> wanted;
  const auto made = [&](size_t elements) -> Tensor& {
    kept.push_back(std::make_unique<Tensor>(dtype, elements + 1));  // and one that stays as it is
    return *kept.back();
  };
  for (int i = 0; i < tensors; ++i) {
    const size_t numel = 1 + numbers() % size_t(most), skipped = i % 3 == 0 ? size_t(start) : 0;
    Tensor &x = made(skipped + numel), &y = made(numel), &out = in_place ? y : made(numel);
    wanted.emplace_back();
    for (size_t e = 0; e < numel; ++e) {
      const double a = int(numbers() % 9) - 4, b = int(numbers() % 9) - 4;
      x.set(skipped + e, a);
      y.set(e, b);
      wanted.back().push_back(0.5 * a + b);
    }
    Flat<2> flat;
    flat.in[0] = static_cast<char*>(x.data()) + skipped * size_t(size_of(dtype));
    flat.in[1] = y.data();
    flat.out = out.data();
    flat.numel = int64_t(numel);
    flats.push_back(flat);
  }
  check(foreach_axpy_launch(flats.data(), tensors, dtype, 0.5, nullptr), "foreach_axpy_launch");
  for (int i = 0; i < tensors; ++i) {
    const auto& right = wanted[size_t(i)];
    const Tensor* out = nullptr;
    for (const auto& one : kept) out = one->data() == flats[size_t(i)].out ? one.get() : out;
    for (size_t e = 0; e < right.size(); ++e) {
      if (!(out->get(e) == right[e])) {
        fail("element %zu of tensor %d of %zu is %g, not %g", e, i, right.size(), out->get(e),
             right[e]);
      }
    }
    if (!std::isnan(out->get(right.size()))) fail("tensor %d is written past its end", i);
  }
  return 0;
}
