// The plain description of rows written to a paged cache, shared by binding and kernel. No torch,
// no CUDA.
#pragma once

#include "division.h"
#include "dtype.h"
#include "layout.h"

namespace cuda_ops {

// Keys or values, and their cache. Strides are in elements.
struct CacheRows {
  const void* rows = nullptr;  // [tokens, heads, dim]
  void* cache = nullptr;       // [blocks, block, heads, dim]
  const float* scale = nullptr;
  int64_t heads = 0, dim = 0;
  int64_t token_step = 0, row_head = 0, row_step = 0;
  int64_t block_step = 0, slot_step = 0, cache_head = 0, cache_step = 0;
  DType cache_dtype = DType::kUnsupported;

  // Heads that follow each other without a gap on both sides are one.
  void merge_heads() {
    const bool follow = row_head == dim * row_step && cache_head == dim * cache_step;
    if (heads != 1 && !follow) return;
    dim *= heads;
    heads = 1;
  }
};

// Slot s of a cache is row s % block of block s / block.
struct CacheWrite {
  CacheRows parts[2];  // keys and values
  const int64_t* slots = nullptr;
  int64_t slots_step = 0;
  int64_t tokens = 0, blocks = 0, block = 0;
  DType dtype = DType::kUnsupported;  // of keys and values
};

// --- the launch configuration: a value, chosen without a GPU ------------------

constexpr int kCacheThreads = 128;

struct CacheConfig {
  int pack = 1;             // elements that a thread reads and writes at once
  int lanes = 1, rows = 1;  // threads of a block: packs of a token, and tokens
  int64_t packs = 0;        // of a token
  int64_t parts = 1;        // of a token, one for each block
  int64_t blocks = 0;
};

// Elements that take 16 bytes where they are wider, in the rows or in the cache.
constexpr int cache_pack(int64_t row_bytes, int64_t cache_bytes) {
  return int(16 / (row_bytes > cache_bytes ? row_bytes : cache_bytes));
}

namespace detail {

// Whether packs of both are whole and aligned.
inline bool has_whole_packs(const CacheRows& part, int64_t row_bytes, int pack) {
  const int64_t cache_bytes = size_of(part.cache_dtype);
  if (part.dim % pack != 0 || part.row_step != 1 || part.cache_step != 1) return false;
  for (const int64_t step :
       {part.token_step, part.row_head, part.block_step, part.slot_step, part.cache_head}) {
    if (step % pack != 0) return false;
  }
  return is_aligned(part.rows, pack * row_bytes) && is_aligned(part.cache, pack * cache_bytes);
}

}  // namespace detail

// For the parts from `first` on to before `last`, which share a dtype of their caches.
inline CacheConfig cache_config(const CacheWrite& p, int first, int last) {
  CacheConfig config;
  config.pack = cache_pack(size_of(p.dtype), size_of(p.parts[first].cache_dtype));
  for (int i = first; i < last; ++i) {
    if (!detail::has_whole_packs(p.parts[i], size_of(p.dtype), config.pack)) config.pack = 1;
  }
  for (int i = first; i < last; ++i) {
    const int64_t packs = p.parts[i].heads * (p.parts[i].dim / config.pack);
    if (packs > config.packs) config.packs = packs;
  }
  if (config.packs == 0) return config;
  config.lanes = int(config.packs < kCacheThreads ? config.packs : kCacheThreads);
  config.rows = kCacheThreads / config.lanes;
  config.parts = ceil_div(config.packs, int64_t(config.lanes));
  config.blocks = ceil_div(p.tokens, int64_t(config.rows)) * config.parts;
  return config;
}

}  // namespace cuda_ops
