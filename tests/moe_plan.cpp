// Prints which kernels moe_plan.h chooses: one line for each line of input,
//   element bytes, device as device_named() reads it, tokens, top_k, H, I, E, whether addresses are
//   aligned, whether the gradient is meant.
#include "moe/moe_plan.h"

#include <iostream>
#include <string>

int main() {
  using namespace cuda_ops;
  int bytes, aligned, backward;
  std::string name;
  DeviceInfo device;
  MoeExperts p;
  while (std::cin >> bytes >> name >> p.tokens >> p.top_k >> p.hidden >> p.inner >> p.map.experts >>
         aligned >> backward) {
    if (!device_named(name.c_str(), device)) return 1;
    p.dtype = bytes == 8 ? DType::kFloat64 : bytes == 4 ? DType::kFloat32 : DType::kBFloat16;
    p.map.assignments = p.tokens * p.top_k;
    p.built_for_hopper = true;
    p.x = reinterpret_cast<const void*>(aligned ? 1024 : 1026);
    MoeExpertsBackward b;
    b.forward = p;
    std::cout << (backward ? moe_plan(b, device) : moe_plan(p, device)).text() << "\n";
  }
}
