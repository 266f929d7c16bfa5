// The plain description of a sort of rows, shared by bindings and kernels: the
// problem, the order of its elements, and how it is launched. No torch, no CUDA.
#pragma once

#include <type_traits>

#include "points.h"
#include "ptx/device_info.h"

namespace cuda_ops {

// Row i has `n` neighboring elements from point i of `rows` on. Its order goes
// to values[i * n...], and where each of them was to indices[i * n...].
struct SortRows {
  Points rows;
  int64_t n = 0;
  bool descending = false;
  void* values = nullptr;  // of the dtype of rows
  int64_t* indices = nullptr;
  void* workspace = nullptr;      // as many bytes as sort_workspace_bytes() says
  bool built_for_hopper = false;  // the library holds sm_90a code
};

// --- the order: bits of any dtype as unsigned integers that compare alike ------

// NaN is the largest whatever its sign and payload, and -0 equals +0, so that a
// stable sort leaves them as they were. U is the unsigned integer of the dtype's
// width. constexpr, so that kernels can call it too.
template <class U> struct Order {
  bool floating = false;
  U sign = 0;             // the sign bit; 0 for unsigned dtypes
  U infinity = U(~U(0));  // its bits; for other dtypes nothing is above it
  U flip = 0;             // all ones where the largest comes first

  constexpr U key(U bits) const {
    // In a register's width: narrower arithmetic takes an instruction more for each step.
    using Wide = std::conditional_t<(sizeof(U) < 4), uint32_t, U>;
    constexpr Wide kAll = U(~U(0));
    const Wide minus = floating ? sign : U(0), magnitude = bits & (kAll ^ minus);
    Wide ordered = bits ^ (bits & minus ? kAll : Wide(sign));
    if (magnitude == 0) ordered = sign;
    if (magnitude > infinity) ordered = kAll;
    return U(ordered ^ flip);
  }

  // Only one value has this key: bits(key) is it. False for zeros and NaNs.
  constexpr bool is_unique(U key) const {
    const U ordered = key ^ flip;
    return !floating || (ordered != sign && ordered != U(~U(0)));
  }

  constexpr U bits(U key) const {
    const U ordered = key ^ flip;
    return floating && !(ordered & sign) ? U(~ordered) : U(ordered ^ sign);
  }
};

template <class U>
constexpr Order<U> order_of(DType dtype, bool descending) {
  Order<U> order;
  const U top = U(U(1) << (8 * sizeof(U) - 1));
  order.flip = descending ? U(~U(0)) : U(0);
  order.sign = dtype == DType::kUInt8 || dtype == DType::kBool ? U(0) : top;
  // clang-format off
  switch (dtype) {
    case DType::kFloat64: order.infinity = U(0x7ff0000000000000); break;
    case DType::kFloat32: order.infinity = U(0x7f800000); break;
    case DType::kFloat16: order.infinity = U(0x7c00); break;
    case DType::kBFloat16: order.infinity = U(0x7f80); break;
    default: return order;
  }
  // clang-format on
  order.floating = true;
  return order;
}

// --- the launch configuration: a value, chosen without a GPU ------------------

constexpr int kSortWarps = 4;      // of a block that sorts a row per warp, or several
constexpr int kSortRun = 1024;     // elements that a warp sorts at once
constexpr int kSortThreads = 512;  // at most, of a block that sorts a row

struct SortConfig {
  enum Path { kNothing, kWarp, kBlock, kCluster, kRadix } path = kNothing;
  int width = 0;             // kWarp: the row's length, rounded up to a size there is code for
  int items = 0;             // kBlock, kCluster: elements of a thread
  int cluster = 0;           // kCluster: blocks of a row
  int threads = 0;           // of a block
  int64_t blocks = 0;        //
  int64_t shared_bytes = 0;  // kBlock
  int64_t rows_at_once = 0;  // kRadix
  int64_t tiles = 0;         // kRadix: of a row
  bool separate = false;     // kRadix of 8-byte keys: a launch for each step, else one
};

// Keys of up to 16 bits share a 32-bit word with the index, in the sorted list
// itself. The list of wider keys holds 16-bit indices, and the keys stay beside it.
// After every 128 bytes 4 are left out, so that threads which walk through
// neighboring runs meet different banks of shared memory.
constexpr int64_t sort_shared_bytes(int64_t elements, int64_t size) {
  const int64_t list = elements * (size <= 2 ? 4 : 2);
  return list + list / 32 + (size <= 2 ? 0 : elements * size);
}

// Elements that the radix sort takes at once, which bounds its workspace unless a row is longer.
constexpr int64_t kRadixElements = int64_t(1) << 28;
constexpr int kRadixThreads = 512;

// Keys of a block, by their size. 4096 8-byte keys are 10 % faster for 2^20 and 10 % slower from
// 2^24 on (H200, 2026-11-22); 12288 narrower keys are slower except for 2^27 of 1 and 2 bytes.
template <int kSize>
constexpr int kRadixTile = kSize == 8 ? 6144 : 8192;

// Elements from which on 8-byte keys take a launch for each step: on an H200 (2026-11-22) 2^27
// random ones took 10.9 ms that way and 12.6 ms in one launch, 2^24 1.36 and 1.26 ms.
constexpr int64_t kRadixSeparate = int64_t(1) << 26;

// Clusters of blocks, for rows that fit their shared memory.
constexpr int kClusterThreads = 1024;   // at most, of a block
constexpr int kClusterBlocks = 8;       // blocks, on any GPU with clusters
constexpr int kWideClusterBlocks = 16;  // blocks, where that many SMs are together

// Measured on an H200, 2026-11-21. One row of 2^16 takes a wide cluster 31 us (float32; 17 and 11
// for two bytes and one, 72 for eight), and launches of a radix sort about twice as long; 2^17 of
// eight bytes 125 us, longer than those launches. A block takes 40 us for 16384, a cluster 21.
constexpr int64_t kClusterShortest = 8192;  // rows are longer, if a block could sort them
constexpr int64_t kClusterRows = 16;        // at most, then: as many as SMs hold
constexpr int64_t kClusterElements = int64_t(1) << 22;  // of all rows together, at most
constexpr int64_t kClusterLongest8 = 65536;             // of 8-byte keys, in a wide cluster

// The clusters of blocks that can be launched.
struct SortClusters {
  bool possible = false;  // the device has them, and there is code for them
  int64_t wide = 0;       // of kWideClusterBlocks full blocks, at once: differs from chip to chip
};

constexpr SortConfig cluster_config(int64_t rows, int64_t n, int64_t size, bool wide) {
  SortConfig config;
  config.path = SortConfig::kCluster;
  config.cluster = wide ? kWideClusterBlocks : kClusterBlocks;
  // With 16, two blocks of an SM wait in turns; 8-byte keys leave no registers for that many.
  config.items = wide || size == 8 ? 8 : 16;
  const int64_t of_warps = 32 * config.items * config.cluster;
  const int64_t warps = (n + of_warps - 1) / of_warps;
  if (warps > kClusterThreads / 32) return {};
  config.threads = warps < 8 ? 256 : int(32 * warps);  // one for each digit
  config.blocks = rows * config.cluster;
  return config;
}

constexpr SortConfig sort_config(int64_t rows, int64_t n, int64_t size, const DeviceInfo& device,
                                 const SortClusters& clusters = {}) {
  SortConfig config;
  if (rows == 0 || n == 0) return config;
  if (n <= kSortRun) {
    config.path = SortConfig::kWarp;
    config.width = n <= 4 ? 4 : 16;
    while (config.width < n) config.width *= 2;
    config.threads = 32 * kSortWarps;
    const int lanes = config.width <= 16 ? 1 : config.width >= 512 ? 32 : config.width / 16;
    const int64_t of_block = kSortWarps * (32 / lanes);
    config.blocks = (rows + of_block - 1) / of_block;
    return config;
  }
  const int64_t runs = (n + kSortRun - 1) / kSortRun;
  const int64_t shared_bytes = sort_shared_bytes(runs * kSortRun, size);
  const bool block = n <= 64 * kSortThreads && shared_bytes <= device.shared_memory_per_block;
  if (clusters.possible && rows * n <= kClusterElements) {
    const bool wide = rows <= clusters.wide;
    const SortConfig of_clusters = cluster_config(rows, n, size, wide);
    const bool pays = (!block || (rows <= kClusterRows && n > kClusterShortest)) &&
                      (size < 8 || (wide && n <= kClusterLongest8));
    if (pays && of_clusters.path == SortConfig::kCluster) return of_clusters;
  }
  if (block) {
    config.path = SortConfig::kBlock;
    config.items = n <= 32 * kSortThreads ? 32 : 64;
    config.threads = int(config.items == 32 ? 32 * runs : 32 * ((runs + 1) / 2));
    config.blocks = rows;
    config.shared_bytes = shared_bytes;
    return config;
  }
  const int64_t tile = size == 8 ? kRadixTile<8> : kRadixTile<4>;
  config.path = SortConfig::kRadix;
  config.threads = kRadixThreads;
  config.tiles = (n + tile - 1) / tile;
  config.rows_at_once = kRadixElements / n > 1 ? kRadixElements / n : 1;
  if (config.rows_at_once > rows) config.rows_at_once = rows;
  config.blocks = config.rows_at_once * config.tiles;
  config.separate = size == 8 && rows * n >= kRadixSeparate;
  return config;
}

// Facts about 8-byte keys that the GPU finds while it sorts them.
struct RadixChoice {
  uint32_t lowest = 0;    // digits from here up are sorted by, at first
  uint32_t differ = 0;    // bit d: digit d of some key is not that of its row's first key
  uint32_t unsorted = 0;  // sorting from `lowest` up was not enough
};

// Where the parts of a radix sort's workspace begin, and how long it is. Sums of
// the digits come first; one pass needs no second place for keys and indices.
struct RadixWorkspace {
  int64_t counts = 0, keys = 0, indices = 0, choice = 0, bytes = 0;
};

constexpr RadixWorkspace radix_workspace(const SortConfig& config, int64_t n, int64_t size) {
  const int64_t elements = size == 1 ? 0 : config.rows_at_once * n;
  RadixWorkspace w;
  w.counts = config.rows_at_once * 256 * 4;
  w.keys = w.counts + w.counts * config.tiles;
  w.indices = w.keys + (elements * size + 255) / 256 * 256;
  w.choice = w.indices + elements * 4;
  w.bytes = w.choice + (size == 8 ? int64_t(sizeof(RadixChoice)) : 0);
  return w;
}

constexpr int64_t sort_workspace_bytes(const SortConfig& config, int64_t n, int64_t size) {
  return config.path == SortConfig::kRadix ? radix_workspace(config, n, size).bytes : 0;
}

}  // namespace cuda_ops
