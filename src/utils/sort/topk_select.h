// How the first k of long rows are selected, for k above what a warp keeps: values, chosen by pure
// functions of sizes and device. No torch, no CUDA.
//
// A block sorts a sample of its chunk of a row. A word of the sorted sample, one that most likely
// comes a little behind the k-th of the chunk, tells which elements to collect in shared memory;
// these are sorted, and the first k of them kept. So the chunk is read once. The sample never
// decides the result: if fewer than k were collected, or too many, the chunk is read again, once
// for each 8 bits of the k-th word.
#pragma once

#include "sort/topk.h"

namespace cuda_ops {

// One launch. As in TopkConfig, what is kept of a row's chunks is a row again.
struct TopkSelect {
  int list = 0;         // room for words in shared memory; 0: better not selected
  int sample_bits = 0;  // 2^this are in the sample; 0: all of a chunk fits the list
  int guess = 0;        // elements up to this word of the sorted sample are collected
  int64_t chunks = 1;   // of a row
  int threads = 0;      // of the block that takes a chunk
  int64_t cost = 0;     // instructions of a warp, as predicted, one block after another
};

constexpr int kSelectThreads = 1024;  // at most
constexpr int kSelectRun = 128;       // words that a warp sorts in registers
constexpr int kSelectOwn = 2048;      // bytes of shared memory beside the list, at most

constexpr int64_t word_bytes(int64_t size) { return size == 8 ? 16 : 8; }

constexpr int bits_up_to(int64_t value) {  // 2^bits is at least the value
  int bits = 0;
  while ((int64_t(1) << bits) < value) ++bits;
  return bits;
}

constexpr int64_t root_above(int64_t value) {
  int64_t root = 0;
  while (root * root < value) ++root;
  return root;
}

// Instructions of a warp, counted in code for sm_90a: 24 for each 32 elements that are read and
// compared; 830 for a run of 128 words and 250 to merge it, 20 for 32 pairs of a step beyond.
constexpr int64_t select_sort_cost(int bits) { return (int64_t(1) << bits) * (5 * bits - 16) / 2; }
constexpr int64_t kSelectLaunchCost = 10000;  // what a multiprocessor could do meanwhile

// Element `number` of a sample of a chunk. It is anywhere in its share of the chunk, so that
// nothing that repeats in a row meets all of the sample. constexpr, so that kernels can call it.
constexpr uint32_t sample_place(uint32_t number, int bits, uint32_t length) {
  const auto begin = uint32_t(uint64_t(number) * length >> bits);
  const auto end = uint32_t((uint64_t(number) + 1) * length >> bits);
  uint32_t drawn = (number + 1) * 0x9e3779b1u;
  drawn = (drawn ^ drawn >> 15) * 0x85ebca77u;
  drawn ^= drawn >> 13;
  return begin + uint32_t(uint64_t(drawn) * (end - begin) >> 32);
}

// Chooses for rows of n elements, or of n words that were kept of a row.
constexpr TopkSelect select_config(int64_t rows, int64_t n, int64_t k, int64_t size,
                                   const DeviceInfo& device) {
  constexpr int64_t kShortest = int64_t(1) << 15, kLongest = int64_t(1) << 18;
  constexpr int kFewestBits = 7, kMostBits = 11;  // of a sample
  constexpr int kMostList = 14;                   // bits
  TopkSelect best;
  if (rows == 0 || n == 0 || k > n) return best;
  // A block for each multiprocessor; chunks so long that a launch leaves few of their elements, and
  // so short that a sample tells enough of them.
  int64_t chunks = device.sms / rows;
  if (chunks > n / kShortest) chunks = n / kShortest;
  if (chunks < (n + kLongest - 1) / kLongest) chunks = (n + kLongest - 1) / kLongest;
  const int64_t length = (n + chunks - 1) / chunks;  // of the longest
  const int64_t blocks = rows * chunks;
  const auto fits = [&](int bits) {
    return bits <= kMostList &&
           (word_bytes(size) << bits) + kSelectOwn <= int64_t(device.shared_memory_per_block);
  };
  const auto consider = [&](int list_bits, int sample_bits, int64_t guess, int64_t cost) {
    if (!fits(list_bits) || (best.list > 0 && best.cost <= cost)) return;
    best.list = 1 << list_bits;
    best.sample_bits = sample_bits;
    best.guess = int(guess);
    best.cost = cost;
  };
  const int all_bits = bits_up_to(length < kSelectRun ? kSelectRun : length);
  consider(all_bits, 0, 0, select_sort_cost(all_bits));
  const int64_t scan = 24 * length / 32;
  for (int bits = kFewestBits; bits <= kMostBits && (length >> bits) > 1; ++bits) {
    // As many of the first k are in the sample as it happens, on average `mean`. The guess is the
    // first number that they reach less than once in 10^5, and the list has room for what five
    // standard deviations more collect.
    const int64_t sample = int64_t(1) << bits, share = (length + sample - 1) / sample;
    const int64_t mean = ((k << bits) + length - 1) / length;
    const int64_t guess = mean + 4 * root_above(mean) + 6;
    if (guess > sample) continue;
    const int64_t likely = guess * share, deviation = root_above(guess) * share;
    int list_bits = bits_up_to(likely + 5 * deviation);
    if (list_bits < bits) list_bits = bits;
    consider(list_bits, bits, guess,
             scan + select_sort_cost(bits) + select_sort_cost(bits_up_to(likely + deviation)));
  }
  best.chunks = chunks;
  // A block alone on its multiprocessor takes all the threads that it has work for.
  best.threads = best.list / (blocks <= device.sms ? (best.sample_bits > 0 ? 1 : 4) : 8);
  if (best.threads < 128) best.threads = 128;
  if (best.threads > kSelectThreads) best.threads = kSelectThreads;
  const int64_t turns = (blocks + device.sms - 1) / device.sms;
  best.cost = turns * best.cost * (size == 8 ? 2 : 1) + kSelectLaunchCost;
  return best;
}

// As many instructions take as long as a whole sort of an H200 and two copies, by measured times.
constexpr int64_t whole_sort_cost(int64_t rows, int64_t n, int64_t size, const DeviceInfo& device) {
  if (sort_config(rows, n, size, device).path == SortConfig::kRadix) {
    return rows * n / device.sms * size * 9 / 2 + (3 * size + 2) * kSelectLaunchCost;
  }
  return (rows + device.sms - 1) / device.sms * n * (4 + size) + 3 * kSelectLaunchCost;
}

// Whether to select the first k of each row, rather than to sort it.
constexpr bool topk_selects(int64_t rows, int64_t n, int64_t k, int64_t size,
                            const DeviceInfo& device) {
  if (topk_sorts(n, k) || k <= kMostKept) return false;
  int64_t cost = 0;
  for (int64_t left = n;;) {
    const TopkSelect config = select_config(rows, left, k, size, device);
    if (config.list == 0) return false;
    cost += config.cost;
    if (config.chunks == 1) break;
    left = config.chunks * k;
  }
  return cost < whole_sort_cost(rows, n, size, device);
}

constexpr int64_t select_workspace_bytes(int64_t rows, int64_t n, int64_t k, int64_t size,
                                         const DeviceInfo& device) {
  const int64_t chunks = select_config(rows, n, k, size, device).chunks;
  const int64_t again = select_config(rows, chunks * k, k, size, device).chunks;
  return topk_kept_bytes(rows, k, chunks, size) + topk_kept_bytes(rows, k, again, size);
}

}  // namespace cuda_ops
