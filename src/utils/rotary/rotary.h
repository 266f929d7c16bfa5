// The plain description of a rotary embedding, shared by bindings and kernels. No torch, no CUDA.
#pragma once

#include "ptx/device_info.h"
#include "strided.h"

namespace cuda_ops {

// Pair j of each head is turned by the angle whose cosine and sine are element j of the token's
// rows of the tables. What is behind the pairs is copied.
struct RotaryHeads {
  int64_t heads = 0, dim = 0, pairs = 0;
  int64_t out_head = 0, x_head = 0;  // from one head to the next, in elements
  int64_t out_step = 0, x_step = 0, cos_step = 0, sin_step = 0;  // along the last dim
  bool interleaved = false;  // pair j: elements 2j and 2j + 1; otherwise j and j + pairs
  bool inverse = false;      // turned back
  bool in_place = false;     // out is x: what is behind the pairs is there already

  int64_t copied() const { return in_place ? 0 : dim - 2 * pairs; }  // elements of a head
};

struct Rotary : RotaryHeads {
  // (out) = f(x, cos, sin), one point per token: where its heads and its rows of the tables start.
  Strided<3> tokens;
  DType dtype = DType::kUnsupported;
  DType table_dtype = DType::kUnsupported;  // dtype, or what it is computed in
};

// --- the launch configuration: a value, chosen without a GPU ------------------

// A unit of a head is two packs: those of `pack` pairs, or two that are copied. A thread takes one
// unit of up to `heads` heads, and reads the tables once for them.
struct RotaryConfig {
  int pack = 1;             // elements
  int lanes = 1, rows = 1;  // threads of a block: units, and groups of heads
  int heads = 1;            // of a group
  int64_t units = 0, groups = 0, blocks = 0;
};

constexpr int kRotaryThreads = 128;
// Loads of 32 bytes that a thread has in flight.
constexpr int kRotaryHeads = 2;

namespace detail {

inline bool whole_vectors(const Operand& operand, int dims, int64_t head, int64_t step,
                          int64_t bytes, int64_t vector) {
  bool whole = is_aligned(operand.data, vector) && step == 1 && head * bytes % vector == 0;
  for (int d = 0; d < dims; ++d) whole = whole && operand.strides[d] * bytes % vector == 0;
  return whole;
}

// Elements of a pack: a vector of 16 or 8 bytes of a head, and as many elements of the tables; or
// one.
inline int rotary_pack(const Rotary& p) {
  const int64_t bytes = size_of(p.dtype), wide = size_of(p.table_dtype);
  const auto& of = p.tokens.operands;
  const int dims = p.tokens.dims;
  for (const int64_t vector : {16, 8}) {
    const int64_t pack = vector / bytes;
    const int64_t angles = pack * wide < 16 ? pack * wide : 16;
    if (p.pairs % pack == 0 && p.copied() % pack == 0 &&
        whole_vectors(of[0], dims, p.out_head, p.out_step, bytes, vector) &&
        whole_vectors(of[1], dims, p.x_head, p.x_step, bytes, vector) &&
        whole_vectors(of[2], dims, 0, p.cos_step, wide, angles) &&
        whole_vectors(of[3], dims, 0, p.sin_step, wide, angles)) {
      return int(pack);
    }
  }
  return 1;
}

}  // namespace detail

inline RotaryConfig rotary_config(const Rotary& p, const DeviceInfo& device) {
  RotaryConfig config;
  config.pack = detail::rotary_pack(p);
  config.units = p.pairs / config.pack + (p.copied() / config.pack + 1) / 2;
  if (config.units == 0) return config;
  config.lanes = int(config.units < kRotaryThreads ? config.units : kRotaryThreads);
  config.rows = kRotaryThreads / config.lanes;
  // Few tokens: fewer heads a thread, so that all multiprocessors have something to do.
  config.heads = kRotaryHeads;
  const int64_t wanted = int64_t(device.sms) * 1024;
  while (config.heads > 1 && (config.heads / 2 >= p.heads ||
                              p.tokens.numel * config.units * p.heads < wanted * config.heads)) {
    config.heads /= 2;
  }
  config.groups = (p.heads + config.heads - 1) / config.heads;
  const int64_t items = p.tokens.numel * config.groups;
  config.blocks = (items + config.rows - 1) / config.rows;
  return config;
}

}  // namespace cuda_ops
