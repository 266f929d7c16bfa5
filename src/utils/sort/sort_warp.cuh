// Rows of up to 1024 elements, each sorted by a warp in its registers, several at once if they are
// short. The first `kept` of each row are written.
#pragma once

#include <cuda_runtime.h>

#include "sort/sort_network.cuh"

namespace cuda_ops {

template <class U, int R, int L>
struct WarpShared {
  static constexpr int kRows = 32 / L, kWidth = R * L;
  static constexpr int kPitch = L < 32 ? kWidth + L : kWidth;  // lanes of all rows on all banks
  static constexpr bool kDirect = kExact<U> && kRows == 1;     // keys become words at once
  // 32 lanes of 32 words exchange them in the list, or beside it where that is narrower; 8-byte
  // keys leave no room for it in the 48 KB of a block.
  static constexpr bool kLines = R == 32 && L == 32 && sizeof(U) < 8;
  static constexpr bool kOwnLines = kLines && !kExact<U>;
  // Where no fewer blocks run on an SM for it.
  static constexpr bool kOneNetwork = L >= 8 && (sizeof(U) < 8 || kWidth != 512);
  U keys[kDirect ? 1 : kRows * kPitch];
  alignas(4) Entry<U> list[kRows * kWidth * 33 / 32];
  uint32_t own_lines[kOwnLines ? 32 * kLinePitch : 1];

  __device__ auto lines() {
    if constexpr (kOwnLines) {
      return own_lines;
    } else if constexpr (kLines) {
      return list;
    } else {
      return nullptr;
    }
  }
};

// Calls `body` with the flag as a type, std::true_type or std::false_type: the code for the common
// case need not check it.
template <class Body>
__device__ void visit_flag(bool flag, Body&& body) {
  if (flag) {
    body(std::true_type{});
  } else {
    body(std::false_type{});
  }
}

template <class U, int R, int L>
__global__ void __launch_bounds__(32 * kSortWarps)
    warp_sort_kernel(const __grid_constant__ SortRows p, const Order<U> order, int kept) {
  using Shared = WarpShared<U, R, L>;
  constexpr int kRows = Shared::kRows, kWidth = Shared::kWidth, kPitch = Shared::kPitch;
  __shared__ Shared all[kSortWarps];
  Shared& shared = all[threadIdx.x / 32];
  const int lane = threadIdx.x % 32, n = int(p.n);
  const int64_t first = (int64_t(blockIdx.x) * kSortWarps + threadIdx.x / 32) * kRows;
  if (first >= p.rows.numel) return;
  const int rows = int(p.rows.numel - first < kRows ? p.rows.numel - first : kRows);
  const int64_t mine = p.rows.offset_at(first + (lane < rows ? lane : 0));
  const U* data = static_cast<const U*>(p.rows.data);
  const int own_row = lane / L;  // the row whose words this lane sorts

  // Element i of the rows together, i < 1024: the quotients are exact.
  const uint32_t inverse = (1u << 20) / n + 1, inverse_kept = (1u << 20) / kept + 1;
  // All words are elements, which lie one after another: no bounds, and no rows to look up.
  const bool whole = rows * n == kRows * kWidth && (kRows == 1 || p.rows.is_line(n));

  uint32_t entries[R];
  visit_flag(whole, [&](auto is_whole) {
    constexpr bool kWhole = is_whole.value;
    const auto row_of = [&](int i) {
      return kWhole ? i / kWidth : kRows > 1 ? int(i * inverse >> 20) : 0;
    };
    const U* begin = data + __shfl_sync(~0u, mine, 0);
    U loaded[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int i = r * 32 + lane;
      if constexpr (kWhole || kRows == 1) {
        loaded[r] = kWhole || i < n ? begin[i] : U(0);
      } else {
        const int64_t offset = __shfl_sync(~0u, mine, row_of(i)) + (i - row_of(i) * n);
        loaded[r] = i < rows * n ? data[offset] : U(0);
      }
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int i = r * 32 + lane;
      const U key = order.key(loaded[r]);
      if constexpr (Shared::kDirect) {
        entries[r] = kWhole || i < n ? exact_word(key, i) : ~0u;
      } else if (kWhole || i < rows * n) {
        shared.keys[row_of(i) * kPitch + i - row_of(i) * (kWhole ? kWidth : n)] = key;
      }
    }
  });
  if constexpr (Shared::kDirect) {
    sort_network<R, L>(entries, shared.lines());
  } else {
    __syncwarp();
    sort_run<R, L, Shared::kOneNetwork>(entries, shared.keys + own_row * kPitch,
                                        shared.list + own_row * kWidth, shared.lines(),
                                        own_row < rows ? n : 0);
    __syncwarp();
  }
  store_entries<U, R>(shared.list, lane * R, entries);
  __syncwarp();

  visit_flag(whole && kept == n, [&](auto is_whole) {
    constexpr bool kWhole = is_whole.value;
#pragma unroll(kWhole ? R : 4)
    for (int r = 0; r < R; ++r) {
      if (!kWhole && r * 32 >= rows * kept) break;
      const int i = r * 32 + lane;
      const int row = kWhole ? i / kWidth : kRows > 1 ? int(i * inverse_kept >> 20) : 0;
      const int64_t offset = __shfl_sync(~0u, mine, row);
      if (!kWhole && i >= rows * kept) continue;
      const int place = i - row * (kWhole ? kWidth : kept);
      const Entry<U> entry = shared.list[padded<U>(row * kWidth + place)];
      const U key = key_of<U>(entry, shared.keys + row * kPitch);
      const int index = entry & 0xffff;
      static_cast<U*>(p.values)[first * kept + i] = value_of(key, order, data + offset, index);
      p.indices[first * kept + i] = index;
    }
  });
}

template <class U>
cudaError_t launch_warps(const SortRows& p, const SortConfig& config, int64_t kept,
                         cudaStream_t stream) {
  const Order<U> order = order_of<U>(p.rows.dtype, p.descending);
  const auto run = [&](auto kernel) {
    kernel<<<unsigned(config.blocks), config.threads, 0, stream>>>(p, order, int(kept));
    return cudaGetLastError();
  };
  switch (config.width) {
    case 4: return run(warp_sort_kernel<U, 4, 1>);
    case 16: return run(warp_sort_kernel<U, 16, 1>);
    case 32: return run(warp_sort_kernel<U, 16, 2>);
    case 64: return run(warp_sort_kernel<U, 16, 4>);
    case 128: return run(warp_sort_kernel<U, 16, 8>);
    case 256: return run(warp_sort_kernel<U, 16, 16>);
    case 512: return run(warp_sort_kernel<U, 16, 32>);
    case 1024: return run(warp_sort_kernel<U, 32, 32>);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace cuda_ops
