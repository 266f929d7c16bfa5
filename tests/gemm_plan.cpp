// Prints which kernel gemm.h chooses: one line for each line of input,
//   element bytes, precision, device as device_named() reads it, m, n, k, a's row and column
//   strides, b's, batch, whether the address is aligned, whether a layer is meant, elements from
//   one matrix of a to the next, and of b.
#include "gemm/gemm.h"

#include <iostream>
#include <string>

int main() {
  using namespace cuda_ops;
  int bytes, precision, aligned, linear;
  std::string name;
  DeviceInfo device;
  int64_t step_a, step_b;
  Matmul p;
  while (std::cin >> bytes >> precision >> name >> p.m >> p.n >> p.k >> p.a.row >> p.a.col >>
         p.b.row >> p.b.col >> p.batch.numel >> aligned >> linear >> step_a >> step_b) {
    if (!device_named(name.c_str(), device)) return 1;
    p.batch.dtype = bytes == 8 ? DType::kFloat64 : bytes == 4 ? DType::kFloat32 : DType::kBFloat16;
    p.precision = static_cast<Precision>(precision);
    p.built_for_hopper = true;
    p.out = {p.n, 1};
    p.batch.dims = p.batch.numel > 1 ? 1 : 0;
    p.batch.sizes[0] = p.batch.numel;
    const int64_t steps[] = {p.m * p.n, step_a, step_b};
    for (int i = 0; i < 3; ++i) {
      p.batch.operands[i].data = reinterpret_cast<void*>(aligned ? 1024 : 1026);
      p.batch.operands[i].strides[0] = steps[i];
    }
    std::cout << gemm_plan(fold_batch(p), device, linear != 0).text() << "\n";
  }
}
