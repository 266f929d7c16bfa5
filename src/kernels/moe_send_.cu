// Tokens, their experts and weights, copied to several ranks of a host by one launch: a rank's
// memory lies in the address space of this GPU. Bound by the links to the other GPUs: what is sent
// is read once, however many ranks get it, and no thread waits for a store.
#include "dtype.cuh"
#include "moe/moe_send.h"
#include "ptx/capability.h"

using namespace cuda_ops;

namespace {

// One chunk of a part. `change(access, rank)` is what the rank gets.
template <int kLoads, class Access, class Change>
__device__ void send_chunk(const SendPart& part, const SendGrain& grain, int ranks, int64_t chunk,
                           const Change& change) {
  const Access* const from = static_cast<const Access*>(part.from);
  const int64_t first = chunk * (kSendThreads * kLoads) + threadIdx.x;
  Access loaded[kLoads];
#pragma unroll
  for (int u = 0; u < kLoads; ++u) {
    const int64_t i = first + u * kSendThreads;
    if (i < grain.accesses) loaded[u] = from[i];
  }
  for (int rank = 0; rank < ranks; ++rank) {
    Access* const to = static_cast<Access*>(part.to[rank]);
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      const int64_t i = first + u * kSendThreads;
      if (i < grain.accesses) to[i] = change(loaded[u], rank);
    }
  }
}

// Whatever the elements are: their bytes stay the same.
template <int kLoads>
__device__ void send_bytes(const SendPart& part, const SendGrain& grain, int ranks, int64_t chunk) {
  const auto same = [](const auto& access, int) { return access; };
  switch (grain.width) {
    case 16: return send_chunk<kLoads, Elements<uint64_t, 2>>(part, grain, ranks, chunk, same);
    case 8: return send_chunk<kLoads, uint64_t>(part, grain, ranks, chunk, same);
    case 4: return send_chunk<kLoads, uint32_t>(part, grain, ranks, chunk, same);
    default: return send_chunk<kLoads, uint16_t>(part, grain, ranks, chunk, same);
  }
}

// Indices count from the first expert of the rank that gets them.
template <int kLoads, int kIndices>
__device__ void send_experts(const MoeSend& p, const SendGrain& grain, int64_t chunk) {
  using Access = Elements<uint64_t, kIndices>;  // which wraps around, as torch's difference does
  send_chunk<kLoads, Access>(p.experts, grain, p.ranks, chunk, [&](Access access, int rank) {
#pragma unroll
    for (int v = 0; v < kIndices; ++v) access.values[v] -= uint64_t(p.firsts[rank]);
    return access;
  });
}

// The short parts come first, so that none of them is what the launch ends with.
template <int kLoads>
__global__ void __launch_bounds__(kSendThreads, kSendBlocksPerSm)
    moe_send_kernel(const __grid_constant__ MoeSend p, const __grid_constant__ SendConfig config) {
  for (int64_t chunk = blockIdx.x; chunk < config.chunks; chunk += gridDim.x) {
    int64_t at = chunk;
    if (at < config.experts.chunks) {
      config.experts.width == 16 ? send_experts<kLoads, 2>(p, config.experts, at)
                                 : send_experts<kLoads, 1>(p, config.experts, at);
      continue;
    }
    at -= config.experts.chunks;
    if (at < config.weights.chunks) {
      send_bytes<kLoads>(p.weights, config.weights, p.ranks, at);
    } else {
      send_bytes<kLoads>(p.x, config.x, p.ranks, at - config.weights.chunks);
    }
  }
}

}  // namespace

// -----------------------------------------------------------------------------

cudaError_t moe_send_launch(const MoeSend& problem, cudaStream_t stream) {
  const SendConfig config = send_config(problem, current_device().sms);
  if (config.blocks == 0) return cudaSuccess;
  auto* kernel = config.loads == 1 ? moe_send_kernel<1> : moe_send_kernel<kSendLoads>;
  kernel<<<unsigned(config.blocks), kSendThreads, 0, stream>>>(problem, config);
  return cudaGetLastError();
}
