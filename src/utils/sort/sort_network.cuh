// Sorting in registers: a network on words over the lanes of a warp, and
// on top of it a stable sort of up to 1024 keys of any width.
//
// A word is as many bits of a key as fit beside the key's position. Words are
// all different, so the network, which is not stable, gives the one stable order;
// and a compare-exchange is one `min` and one `max`, where a 64-bit pair of key
// and position takes six instructions.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "sort/sort.h"

namespace cuda_ops {

// Returns the element with this key: made from it, or read again where others share the key.
template <class U>
__device__ U value_of(U key, const Order<U>& order, const U* row, int64_t index) {
  return order.is_unique(key) ? order.bits(key) : row[index];
}

// --- the network ---------------------------------------------------------------

template <class W>
__device__ W lower(W a, W b) {
  return a < b ? a : b;
}
template <class W>
__device__ W higher(W a, W b) {
  return a < b ? b : a;
}

template <class W>
__device__ void compare_exchange(W& a, W& b) {
  const W low = lower(a, b);
  b = higher(a, b);
  a = low;
}

// Returns the word of the lane whose number differs in the bits of `mask`.
template <class W>
__device__ W exchange(W word, int mask) {
  if constexpr (sizeof(W) == 16) {
    const uint64_t low = __shfl_xor_sync(~0u, uint64_t(word), mask);
    return W(__shfl_xor_sync(~0u, uint64_t(word >> 64), mask)) << 64 | low;
  } else {
    return __shfl_xor_sync(~0u, word, mask);
  }
}

// Batcher's odd-even merge sort: of 32 words 191 comparisons, bitonic 240. A
// template for each step: the compiler gives up on unrolling these loops, and
// registers must have constant indices.
template <int kSize, int kStep, class W, int R>
__device__ void sort_registers(W (&words)[R]) {
#pragma unroll
  for (int i = 0; i + kStep < R; ++i) {
    const int from = i - kStep % kSize;
    const bool first = from >= 0 && from / kStep % 2 == 0;
    if (first && i / (2 * kSize) == (i + kStep) / (2 * kSize)) {
      compare_exchange(words[i], words[i + kStep]);
    }
  }
  if constexpr (kStep > 1) {
    sort_registers<kSize, kStep / 2>(words);
  } else if constexpr (2 * kSize < R) {
    sort_registers<2 * kSize, 2 * kSize>(words);
  }
}

// The steps of a bitonic merge within a lane, the last ones.
template <int kStep, int R, class W>
__device__ void merge_registers(W (&words)[R]) {
#pragma unroll
  for (int r = 0; r < R; ++r) {
    if ((r & kStep) == 0) compare_exchange(words[r], words[r + kStep]);
  }
  if constexpr (kStep > 1) merge_registers<kStep / 2>(words);
}

// The steps between lanes of a merge over kLanes of them, by shuffles. The first compares with
// the mirror image, so that all steps have the same direction.
template <int kLanes, int R, class W>
__device__ void merge_lanes(W (&words)[R]) {
  const int lane = threadIdx.x % 32;
  const bool low = (lane & (kLanes / 2)) == 0;
#pragma unroll
  for (int r = 0; r < R / 2; ++r) {
    const W mirror = exchange(words[R - 1 - r], kLanes - 1);
    const W other = exchange(words[r], kLanes - 1);
    words[r] = low ? lower(words[r], mirror) : higher(words[r], mirror);
    words[R - 1 - r] = low ? lower(words[R - 1 - r], other) : higher(words[R - 1 - r], other);
  }
#pragma unroll
  for (int step = kLanes / 4; step > 0; step /= 2) {
    const bool low = (lane & step) == 0;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const W other = exchange(words[r], step);
      words[r] = low ? lower(words[r], other) : higher(words[r], other);
    }
  }
}

// The same through shared memory, where lane l takes the words l, l + 32, ... of the warp: steps
// between lanes are steps between registers then. By shuffles each lane of two computes both the
// lower and the higher word, and drops one. A line of 32 words has one left out after it, so that
// a lane's own words and those of all lanes with one number are both on different banks. So does
// the sorted list (padded()), which can be the lines where its entries are words.
constexpr int kLinePitch = 33;
template <int kLanes>
__device__ void merge_lines(uint32_t (&words)[32], uint32_t* lines) {
  // Two runs of so many lanes are merged; turned over, of so many registers of each lane.
  constexpr int kHalf = kLanes / 2;
  const int lane = threadIdx.x % 32;
  __syncwarp();  // what was in the lines has been read
#pragma unroll
  for (int r = 0; r < 32; ++r) lines[lane * kLinePitch + r] = words[r];
  __syncwarp();
#pragma unroll
  for (int r = 0; r < 32; ++r) {
    const int mirrored = r ^ (kHalf - 1);
    words[r] = r & kHalf ? lines[mirrored * kLinePitch + 31 - lane] : lines[r * kLinePitch + lane];
  }
  merge_registers<kHalf>(words);
  __syncwarp();
#pragma unroll
  for (int r = 0; r < 32; ++r) lines[r * kLinePitch + lane] = words[r];
  __syncwarp();
#pragma unroll
  for (int r = 0; r < 32; ++r) words[r] = lines[lane * kLinePitch + r];
}

// Sorts the words of each L neighboring lanes: afterwards words[r] of lane l is number
// l * R + r. `lines` is room in shared memory for 32 lines of a warp with 32 words a lane, or
// nullptr: then lanes shuffle. kLanes, whose runs are merged first, is the function's own.
template <int R, int L, int kLanes = 1, class W, class Lines>
__device__ void sort_network(W (&words)[R], Lines lines) {
  if constexpr (kLanes == 1) {
    sort_registers<1, 1>(words);
  } else {
    if constexpr (std::is_null_pointer_v<Lines>) {
      merge_lanes<kLanes>(words);
    } else {
      merge_lines<kLanes>(words, lines);
    }
    merge_registers<R / 2>(words);
  }
  if constexpr (kLanes < L) sort_network<R, L, 2 * kLanes>(words, lines);
}

// --- the sorted list in shared memory -------------------------------------------

// Keys of up to 16 bits are part of their entry; an entry for wider ones is the
// position alone.
template <class U>
constexpr bool kExact = sizeof(U) <= 2;
template <class U>
using Entry = std::conditional_t<kExact<U>, uint32_t, uint16_t>;

// The word of a key that fits, which is its entry, too.
template <class U>
__device__ uint32_t exact_word(U key, int position) {
  static_assert(kExact<U>);
  return uint32_t(key) << 16 | uint32_t(position);
}

// Where entry i lies: see sort_shared_bytes().
template <class U>
__device__ int padded(int i) {
  constexpr int kEntries = 128 / sizeof(Entry<U>);
  return i + i / kEntries * (kEntries / 32);
}

template <class U>
__device__ U key_of(Entry<U> entry, const U* keys) {
  if constexpr (kExact<U>) {
    return U(entry >> 16);
  } else {
    return keys[entry];
  }
}

// Entries first, first + 1, ... of a thread; `first` is a multiple of R.
template <class U, int R>
__device__ void store_entries(Entry<U>* list, int first, const uint32_t (&entries)[R]) {
  if constexpr (kExact<U>) {
#pragma unroll
    for (int r = 0; r < R; ++r) list[padded<U>(first) + r + (R > 32 ? r / 32 : 0)] = entries[r];
  } else {
    auto* pairs = reinterpret_cast<uint32_t*>(list) + padded<U>(first) / 2;
#pragma unroll
    for (int r = 0; r < R; r += 2) pairs[r / 2] = entries[r] | entries[r + 1] << 16;
  }
}

// --- a stable sort of n <= R * L keys by L lanes ---------------------------------

template <int L, class U>
__device__ U lanes_min(U value) {
#pragma unroll
  for (int step = L / 2; step > 0; step /= 2) {
    const U other = __shfl_xor_sync(~0u, value, step);
    value = other < value ? other : value;
  }
  return value;
}

// Puts words that are in the order of their prefixes in the order of whole keys. For random data
// that exchanges a few neighbors, for keys around a few centres, where up to 24 share a prefix, it
// takes more passes; both cost less than going by digits. Returns false if it does not come to an
// end, or if a lane sees in the first pass that it will not.
template <int R, int L, class U>
__device__ bool repair(uint32_t (&words)[R], const U* keys, int n) {
  // A pass moves a key by two places, and the last one moves none.
  constexpr int kRun = 24, kPasses = R > kRun ? kRun / 2 + 1 : 6;
  const int lane = threadIdx.x % L;
  bool longer = false;  // a run of keys that share a prefix
#pragma unroll
  for (int r = 0; r + kRun < R; ++r) {
    const bool alike = (words[r] ^ words[r + kRun]) < uint32_t(R * L);
    longer |= alike && words[r + kRun] != ~0u;  // which is behind the last key
  }
  U own[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    words[r] &= R * L - 1;
    own[r] = int(words[r]) < n ? keys[words[r]] : U(~U(0));
  }
  for (int pass = 0; pass < kPasses; ++pass) {
    bool moved = false;
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
#pragma unroll
      for (int r = odd; r + 1 < R; r += 2) {
        const bool wrong = own[r] > own[r + 1];
        const U key = own[r];
        const uint32_t word = words[r];
        own[r] = wrong ? own[r + 1] : key;
        words[r] = wrong ? words[r + 1] : word;
        own[r + 1] = wrong ? key : own[r + 1];
        words[r + 1] = wrong ? word : words[r + 1];
        moved |= wrong;
      }
    }
    if constexpr (L > 1) {
      const U next = __shfl_down_sync(~0u, own[0], 1), last = __shfl_up_sync(~0u, own[R - 1], 1);
      const uint32_t next_word = __shfl_down_sync(~0u, words[0], 1);
      const uint32_t last_word = __shfl_up_sync(~0u, words[R - 1], 1);
      const bool from_next = lane < L - 1 && own[R - 1] > next, from_last = lane && last > own[0];
      own[R - 1] = from_next ? next : own[R - 1];
      words[R - 1] = from_next ? next_word : words[R - 1];
      own[0] = from_last ? last : own[0];
      words[0] = from_last ? last_word : words[0];
      moved |= from_next;
    }
    if (!__any_sync(~0u, moved)) return true;
    if (R > kRun && pass == 0 && __any_sync(~0u, moved && longer)) return false;
  }
  return false;
}

// From positions in the order of their keys' prefixes, `shift` bits being left out, to words that
// say all of a key of 4 bytes: the place where its run of equal prefixes begins, the bits left out,
// and the position. Each has as many bits as a position at most, since prefix and position were a
// word.
template <int R, int L>
__device__ void refine(uint32_t (&words)[R], const uint32_t* keys, uint32_t low, int shift, int n) {
  constexpr int kBits = 31 - __builtin_clz(R * L);
  const int lane = threadIdx.x % L;
  const auto key_at = [&](uint32_t i) { return int(i) < n ? keys[i] - low : ~0u; };
  uint32_t before = __shfl_up_sync(~0u, key_at(words[R - 1]) >> shift, 1, L);
  uint32_t begin = 0;  // of the run, if it begins in this lane
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const uint32_t i = words[r], key = key_at(i), prefix = key >> shift;
    if (lane * R + r > 0 && prefix != before) begin = lane * R + r;
    before = prefix;
    const uint32_t rest = key & ((1u << shift) - 1);
    words[r] = int(i) < n ? begin << 2 * kBits | rest << kBits | i : ~0u;
  }
#pragma unroll
  for (int step = 1; step < L; step *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, begin, step, L);
    begin = other > begin ? other : begin;
  }
  const uint32_t last = __shfl_up_sync(~0u, begin, 1, L), earlier = lane > 0 ? last : 0;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    if (words[r] >> 2 * kBits == 0) words[r] |= earlier << 2 * kBits;
  }
}

// entries[r] of lane l becomes the position of key number l * R + r, together with
// the key where it fits. `keys` are in shared memory; `list` is room for R * L entries, and
// `lines` for words, as sort_network() has it.
//
// The prefixes are taken from the range of the keys, so that 32-bit integers of
// a small range are sorted at once. Keys that share too many prefixes are sorted again by what
// prefixes leave out, or digit by digit, the last one first, each pass being stable.
// kOneNetwork: prefixes and digits go through the same network, in a loop, which is half the code
// and may take more registers.
template <int R, int L, bool kOneNetwork, class U, class Lines>
__device__ void sort_run(uint32_t (&entries)[R], const U* keys, Entry<U>* list, Lines lines,
                         int n) {
  constexpr uint32_t kMask = R * L - 1;
  const int lane = threadIdx.x % L;
  if constexpr (kExact<U>) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int i = r * L + lane;
      entries[r] = i < n ? exact_word(keys[i], i) : ~0u;
    }
    sort_network<R, L>(entries, lines);
  } else {
    U low = U(~U(0)), high = U(~U(0));  // high is the highest's complement: only min is needed
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int i = r * L + lane;
      const U key = i < n ? keys[i] : U(~U(0)), other = i < n ? U(~key) : U(~U(0));
      low = key < low ? key : low;
      high = other < high ? other : high;
    }
    low = lanes_min<L>(low);
    high = U(~lanes_min<L>(high));
    const U range = n > 0 ? U(high - low) : U(0);
    const int bits = range == 0 ? 0 : sizeof(U) == 8 ? 64 - __clzll(range) : 32 - __clz(range);
    constexpr int kDigit = 32 - (31 - __builtin_clz(R * L));
    const int shift = bits > kDigit ? bits - kDigit : 0;
    const auto take_digits = [&](int done) {
      __syncwarp();
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const int i = r * L + lane;
        const U key = i < n ? keys[list[i]] - low : U(0);
        entries[r] = i < n ? uint32_t(key >> done) << (32 - kDigit) | i : ~0u;
      }
    };
    const auto list_in_order = [&] {
#pragma unroll
      for (int r = 0; r < R; ++r) list[r * L + lane] = r * L + lane;
    };
    const auto list_by_entries = [&] {
#pragma unroll
      for (int r = 0; r < R; ++r) entries[r] = list[entries[r] & kMask];
      __syncwarp();
#pragma unroll
      for (int r = 0; r < R; ++r) list[lane * R + r] = entries[r];
    };
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int i = r * L + lane;
      entries[r] = i < n ? uint32_t((keys[i] - low) >> shift) << (32 - kDigit) | i : ~0u;
    }
    // By code for sm_90a, for shorter rows this takes so many registers that fewer warps run, and
    // the two networks of a block's runs leave it none.
    if constexpr (sizeof(U) == 4 && kOneNetwork && R * L >= 512) {
#pragma unroll 1
      for (bool again = false;; again = true) {
        sort_network<R, L>(entries, lines);
        if (again || !__any_sync(~0u, shift > 0) || repair<R, L>(entries, keys, n)) break;
        refine<R, L>(entries, keys, low, shift, n);
      }
    } else if constexpr (kOneNetwork) {
#pragma unroll 1
      for (int done = -kDigit;;) {
        sort_network<R, L>(entries, lines);
        if (done >= 0) {
          list_by_entries();
        } else if (!__any_sync(~0u, shift > 0) || repair<R, L>(entries, keys, n)) {
          break;
        } else {
          list_in_order();
        }
        done += kDigit;
        if (!__any_sync(~0u, done < bits)) break;
        take_digits(done);
      }
    } else {
      sort_network<R, L>(entries, lines);
      if (__any_sync(~0u, shift > 0) && !repair<R, L>(entries, keys, n)) {
        list_in_order();
#pragma unroll 1
        for (int done = 0; __any_sync(~0u, done < bits); done += kDigit) {
          take_digits(done);
          sort_network<R, L>(entries, lines);
          list_by_entries();
        }
      }
    }
#pragma unroll
    for (int r = 0; r < R; ++r) entries[r] &= kMask;
  }
}

}  // namespace cuda_ops
