// Class 9: the CUDA entry hands back a tensor on the CPU.
#include "bad.h"

using namespace cuda_ops;

namespace {

Tensor bad_devices_cpu(const Tensor& x) { return copied(x); }

Tensor bad_devices_cuda(const Tensor& x) {
  Tensor out = empty_strided(x.sizes().data(), x.strides().data(), x.dim(), dtype_of(x),
                             {aoti_torch_device_type_cpu(), 0});
  detail::check_torch(aoti_torch_copy_(out.get(), x.get(), 0), "copy the result");
  return out;
}

}  // namespace

CUDA_OPS(library) {
  library.op("bad_devices(Tensor x) -> Tensor", "()->()")
      .dtypes(kWide)
      .cpu<bad_devices_cpu>()
      .cuda<bad_devices_cuda>();
}
