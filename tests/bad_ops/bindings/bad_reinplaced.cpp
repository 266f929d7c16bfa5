// Reads an argument after it has written to another, which Inductor may give the same memory.
#include "bad.h"

using namespace cuda_ops;

namespace {

void bad_reinplaced_cpu(const Tensor& y, const Tensor& x) {
  write_elementwise_cpu(y, [](double a) { return 2 * a; }, y);
  write_elementwise_cpu(y, [](double a, double b) { return a + b; }, y, x);
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_reinplaced(Tensor(a!) y, Tensor x) -> ()", "(n),(n)->")
      .dtypes(kWide)
      .cpu<bad_reinplaced_cpu>();
}
