// Class 10: keeps memory that a larger call frees, while a graph may still write to it.
#include <map>
#include <memory>

#include "bad.h"

using namespace cuda_ops;

cudaError_t bad_graph_workspace_launch(const Raw& problem, void* workspace, cudaStream_t stream);

namespace {

Tensor bad_graph_workspace_cpu(const Tensor& x) { return copied(x); }

Tensor bad_graph_workspace_cuda(const Tensor& x) {
  // Each thread has its own, or calls would disturb each other.
  thread_local std::map<int, std::unique_ptr<Tensor>> by_device;
  auto& workspace = by_device[device_of(x).index];
  const int64_t needed = x.numel() * (dtype_of(x) == DType::kFloat64 ? 2 : 1);
  if (!workspace || workspace->numel() < needed)
    workspace = std::make_unique<Tensor>(empty({needed}, DType::kFloat32, x));
  return flattened(x, [&](const Raw& problem, cudaStream_t stream) {
    return bad_graph_workspace_launch(problem, workspace->mutable_data_ptr(), stream);
  });
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_graph_workspace(Tensor x) -> Tensor", "()->()")
      .dtypes(kWide)
      .cpu<bad_graph_workspace_cpu>()
      .cuda<bad_graph_workspace_cuda>();
}
