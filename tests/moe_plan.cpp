// Prints which kernels moe_plan.h chooses: one line for each line of input,
//   element bytes, capability, tokens, top_k, H, I, E, whether addresses are aligned, whether
//   the gradient is meant.
#include "moe/moe_plan.h"

#include <iostream>

int main() {
  using namespace cuda_ops;
  int bytes, capability, aligned, backward;
  MoeExperts p;
  while (std::cin >> bytes >> capability >> p.tokens >> p.top_k >> p.hidden >> p.inner >>
         p.map.experts >> aligned >> backward) {
    p.dtype = bytes == 8 ? DType::kFloat64 : bytes == 4 ? DType::kFloat32 : DType::kBFloat16;
    p.map.assignments = p.tokens * p.top_k;
    p.built_for_hopper = true;
    p.x = reinterpret_cast<const void*>(aligned ? 1024 : 1026);
    MoeExpertsBackward b;
    b.forward = p;
    std::cout << (backward ? moe_plan(b, capability) : moe_plan(p, capability)).text() << "\n";
  }
}
