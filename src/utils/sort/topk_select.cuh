// Selects the first k of a chunk by a block, for k above what a warp keeps: topk_select.h says how.
// All is done with words, a key and its index: they are all different, so what is collected in any
// order is in the one stable order once it is sorted, and equal keys need no count of their own.
#pragma once

#include "ptx/warp.cuh"
#include "sort/sort_warp.cuh"
#include "sort/topk_select.h"

namespace cuda_ops {

// A key, and below it the index: all words differ, and the first of equal keys is the smallest.
template <class U>
using Word = std::conditional_t<sizeof(U) == 8, unsigned __int128, uint64_t>;
template <class U>
__device__ Word<U> word_of(U key, int64_t index) {
  return Word<U>(key) << 32 | uint32_t(index);
}

// Where words come from. What is loaded becomes a word in a second step, so that loads do not wait
// for each other.
template <class U>
struct RowSource {  // elements of a row, the first one with index `begin`
  using Loaded = U;
  const U* own;
  Order<U> order;
  uint32_t begin;
  __device__ Word<U> word(U loaded, uint32_t i) const {
    return word_of(order.key(loaded), begin + i);
  }
};
template <class U>
struct KeptSource {  // words that were kept before
  using Loaded = Word<U>;
  const Word<U>* own;
  __device__ Word<U> word(Word<U> loaded, uint32_t) const { return loaded; }
};

// Calls `body(source)` for the words of a row from `begin` on, which has n of them in `data` or,
// unless that is null, in `from`.
template <class U, class Body>
__device__ void with_source(const U* data, const Order<U>& order, const Word<U>* from, int64_t row,
                            int64_t n, int64_t begin, const Body& body) {
  if (from == nullptr) {
    body(RowSource<U>{data + begin, order, uint32_t(begin)});
  } else {
    body(KeptSource<U>{from + row * n + begin});
  }
}

// --- a bitonic sort by a block ----------------------------------------------------

// Runs of 128 words in registers, word r * 32 + lane in words[r]: no two lanes meet in a bank.
template <class W>
struct SelectRun {
  static constexpr int R = kSelectRun / 32;
  W words[R];

  __device__ explicit SelectRun(const W* from) {
#pragma unroll
    for (int r = 0; r < R; ++r) words[r] = from[r * 32 + threadIdx.x % 32];
  }
  __device__ void store(W* to) const {
#pragma unroll
    for (int r = 0; r < R; ++r) to[r * 32 + threadIdx.x % 32] = words[r];
  }
  // The last steps of a bitonic merge.
  __device__ void merge() {
    merge_registers<R / 2>(words);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      const bool low = (threadIdx.x & step) == 0;
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const W other = exchange(words[r], step);
        words[r] = low ? lower(words[r], other) : higher(words[r], other);
      }
    }
  }
};

// Sorts `size` words in shared memory, a power of two from kSelectRun on. Steps over less than a
// run are taken in registers.
template <class W>
__device__ void sort_words(W* list, int size) {
  constexpr int R = SelectRun<W>::R;
  const int thread = threadIdx.x, threads = blockDim.x, lane = thread % 32;
  const int first = thread / 32 * kSelectRun, next = threads / 32 * kSelectRun;
  __syncthreads();
  for (int run = first; run < size; run += next) {
    SelectRun<W> own(list + run);
    sort_network<R, 32>(own.words, nullptr);
    __syncwarp();
#pragma unroll
    for (int r = 0; r < R; ++r) list[run + lane * R + r] = own.words[r];
  }
  for (int width = 2 * kSelectRun; width <= size; width *= 2) {
    __syncthreads();
    // The first step compares with the mirror image, so that all have the same direction.
    for (int i = thread; i < size / 2; i += threads) {
      const int at = i & (width / 2 - 1), begin = 2 * (i - at);
      compare_exchange(list[begin + at], list[begin + width - 1 - at]);
    }
    for (int step = width / 4; step >= kSelectRun; step /= 2) {
      __syncthreads();
      for (int i = thread; i < size / 2; i += threads) {
        const int low = 2 * i - (i & (step - 1));
        compare_exchange(list[low], list[low + step]);
      }
    }
    __syncthreads();
    for (int run = first; run < size; run += next) {
      SelectRun<W> own(list + run);
      own.merge();
      own.store(list + run);
    }
  }
  __syncthreads();
}

// --- the words up to a limit ------------------------------------------------------

struct SelectShared {
  uint32_t count;        // of collected words, with those the list has no room for
  uint32_t digits[256];  // words with each digit
  uint32_t digit, before, inside;
};
static_assert(sizeof(SelectShared) <= kSelectOwn, "select_config() leaves less");

// Puts those of `length` words that are up to `limit` into the list, in any order, as long as there
// is room. Returns how many there are.
template <class W, class Source>
__device__ uint32_t collect(W* list, uint32_t room, SelectShared& shared, W limit, uint32_t length,
                            const Source& source) {
  constexpr int kLoads = sizeof(W) == 16 ? 4 : 8;  // of a lane before it looks at any
  constexpr uint32_t kPiece = 32 * kLoads;
  const uint32_t lane = threadIdx.x % 32;
  __syncthreads();  // list and count have been read
  if (threadIdx.x == 0) shared.count = 0;
  __syncthreads();
  for (uint32_t first = threadIdx.x / 32 * kPiece; first < length; first += blockDim.x * kLoads) {
    const uint32_t own = first + lane;
    const auto* from = source.own + own;  // one address for all loads
    typename Source::Loaded loaded[kLoads];
    if (first + kPiece <= length) {
#pragma unroll
      for (int u = 0; u < kLoads; ++u) loaded[u] = from[u * 32];
    } else {
#pragma unroll
      for (int u = 0; u < kLoads; ++u) {
        loaded[u] = own + u * 32 < length ? from[u * 32] : typename Source::Loaded(0);
      }
    }
    uint32_t wanted[kLoads], all = 0;
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      const uint32_t i = own + u * 32;
      const bool inside = i < length, up_to = source.word(loaded[u], i) <= limit;
      wanted[u] = __ballot_sync(~0u, inside & up_to);
      all += __popc(wanted[u]);
    }
    if (all == 0) continue;
    uint32_t slot = 0;
    if (lane == 0) slot = atomicAdd(&shared.count, all);
    slot = __shfl_sync(~0u, slot, 0);
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      if (wanted[u] == 0) continue;
      const uint32_t place = slot + __popc(wanted[u] & ((1u << lane) - 1));
      if ((wanted[u] >> lane & 1) != 0 && place < room) {
        list[place] = source.word(loaded[u], own + u * 32);
      }
      slot += __popc(wanted[u]);
    }
  }
  __syncthreads();
  return shared.count;
}

// Returns a limit that at least k words are up to and no more than `room`, which is at least k. It
// is found from the first digit on, a digit of 8 bits each time all words are read.
template <class U, class Source>
__device__ Word<U> limit_by_digits(uint32_t room, SelectShared& shared, uint32_t k, uint32_t length,
                                   const Source& source) {
  using W = Word<U>;
  const uint32_t thread = threadIdx.x, lane = thread % 32;
  W prefix = 0;
  uint32_t rest = k;  // the number of the k-th among words with the prefix
  for (int shift = 32 + 8 * int(sizeof(U)) - 8;; shift -= 8) {
    __syncthreads();
    for (uint32_t i = thread; i < 256; i += blockDim.x) shared.digits[i] = 0;
    __syncthreads();
#pragma unroll 4
    for (uint32_t first = thread - lane; first < length; first += blockDim.x) {
      const uint32_t i = first + lane;
      const W word = i < length ? source.word(source.own[i], i) : ~W(0);
      const bool alike = i < length && word >> shift >> 8 == prefix >> shift >> 8;
      const uint32_t digit = uint32_t(word >> shift) & 255;
      // One lane adds for all with its digit, since they may all have the same.
      const uint32_t lanes = lanes_alike<9>(alike ? digit : 256);
      if (alike && lanes >> lane == 1) atomicAdd(&shared.digits[digit], uint32_t(__popc(lanes)));
    }
    __syncthreads();
    if (thread < 32) {
      uint32_t own[8], sum = 0;
#pragma unroll
      for (int d = 0; d < 8; ++d) sum += own[d] = shared.digits[lane * 8 + d];
      uint32_t before = sum_up_to_lane(sum) - sum;
#pragma unroll
      for (int d = 0; d < 8; ++d) {
        if (before < rest && rest - before <= own[d]) {  // once, of all digits
          shared.digit = lane * 8 + d;
          shared.before = before;
          shared.inside = own[d];
        }
        before += own[d];
      }
    }
    __syncthreads();
    prefix |= W(shared.digit) << shift;
    rest -= shared.before;
    if (shift == 0 || k - rest + shared.inside <= room) {
      return prefix | ((W(1) << shift) - 1);
    }
  }
}

// --- the kernel -------------------------------------------------------------------

// Fills the list with all of `length` words, or with a sample; returns how many those are.
template <class W, class Source>
__device__ uint32_t fill(W* list, int sample_bits, uint32_t length, const Source& source) {
  const uint32_t count = sample_bits == 0 ? length : 1u << sample_bits;
  for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) {
    const uint32_t at = sample_bits == 0 ? i : sample_place(i, sample_bits, length);
    list[i] = source.word(source.own[at], at);
  }
  return count;
}

// Fills the list, which is the sorted sample, with the first k of `length` words and some more; k
// is no more than `length`. Returns how many those are.
template <class U, class Source>
__device__ uint32_t fill_by_sample(Word<U>* list, SelectShared& shared, const TopkSelect& config,
                                   uint32_t k, uint32_t length, const Source& source) {
  const uint32_t room = uint32_t(config.list);
  for (Word<U> limit = list[config.guess - 1];;) {
    const uint32_t count = collect(list, room, shared, limit, length, source);
    if (count >= k && count <= room) return count;
    limit = limit_by_digits<U>(room, shared, k, length, source);
  }
}

// Reads the rows, or what was kept of their chunks; writes the results, or what is kept. Each chunk
// has a block.
template <class U>
__global__ void __launch_bounds__(kSelectThreads)
    topk_select_kernel(const __grid_constant__ TopkRows p, const Order<U> order,
                       const __grid_constant__ TopkSelect config, int64_t n, const Word<U>* from,
                       Word<U>* to) {
  using W = Word<U>;
  extern __shared__ uint4 memory[];
  __shared__ SelectShared shared;
  W* list = reinterpret_cast<W*>(memory);
  const int64_t number = blockIdx.x, row = number / config.chunks;
  const int64_t chunk = number - row * config.chunks;
  const int64_t begin = n * chunk / config.chunks, end = n * (chunk + 1) / config.chunks;
  const uint32_t k = uint32_t(p.k), length = uint32_t(end - begin);
  const U* data = static_cast<const U*>(p.sort.rows.data) + p.sort.rows.offset_at(row);
  const auto visit = [&](const auto& body) {
    with_source<U>(data, order, from, row, n, begin, body);
  };
  uint32_t count = 0;
  visit([&](const auto& source) { count = fill(list, config.sample_bits, length, source); });
  for (bool sampled = config.sample_bits > 0;; sampled = false) {  // the code for it just once
    uint32_t size = kSelectRun;
    while (size < count) size *= 2;
    for (uint32_t i = count + threadIdx.x; i < size; i += blockDim.x) list[i] = ~W(0);
    sort_words(list, int(size));
    if (!sampled) break;
    visit([&](const auto& source) {
      count = fill_by_sample<U>(list, shared, config, k, length, source);
    });
  }
  for (uint32_t i = threadIdx.x; i < k; i += blockDim.x) {
    const W word = list[i];
    if (to != nullptr) {
      to[number * k + i] = word;
    } else {
      const uint32_t index = uint32_t(word);
      const U key = U(word >> 32);
      static_cast<U*>(p.sort.values)[row * k + i] = value_of(key, order, data, index);
      p.sort.indices[row * k + i] = index;
    }
  }
}

template <class U>
cudaError_t launch_select(const TopkRows& p, const TopkSelect& config, int64_t n,
                          const Word<U>* from, Word<U>* to, const DeviceInfo& device,
                          cudaStream_t stream) {
  if (config.list == 0) return cudaErrorInvalidValue;  // topk_selects() says so before
  const auto kernel = topk_select_kernel<U>;
  const int bytes = config.list * int(sizeof(Word<U>));
  // Always the most: another thread may set less than this launch takes just before it.
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           device.shared_memory_per_block - kSelectOwn);
  if (error != cudaSuccess) return error;
  kernel<<<unsigned(p.sort.rows.numel * config.chunks), config.threads, bytes, stream>>>(
      p, order_of<U>(p.sort.rows.dtype, p.sort.descending), config, n, from, to);
  return cudaGetLastError();
}

}  // namespace cuda_ops
