// Rotary embeddings and writes to a paged cache: heads and rows of whole vectors, of single
// elements and with gaps, every dtype, one token and several for each block of threads.
#include <numeric>

#include "cases.h"

#include "cache_write_.cu"
#include "rotary_embedding.cu"

using namespace emulator;

namespace {

struct Heads {
  int64_t batch, tokens, heads, dim, pairs, gap;
};

void run_rotary(std::mt19937& numbers, Heads at, DType dtype, DType table, bool interleaved,
                bool in_place) {
  const int64_t head = at.dim + at.gap, token = at.heads * head, all = at.batch * at.tokens;
  Tensor x(dtype, size_t(all * token)), out(dtype, size_t(all * at.heads * at.dim));
  Tensor cosines(table, size_t(at.tokens * at.pairs)), sines(table, size_t(at.tokens * at.pairs));
  for (Tensor* one : {&x, &cosines, &sines}) one->fill(numbers, 1);
  const std::vector<double> before = x.values(), c = cosines.values(), s = sines.values();
  std::vector<double> wanted = in_place ? before : std::vector<double>();
  for (int64_t i = 0; i < all * at.heads; ++i) {
    std::vector<double> row(before.begin() + i * head, before.begin() + i * head + at.dim);
    for (int64_t j = 0; j < at.pairs; ++j) {
      const int64_t first = interleaved ? 2 * j : j,
                    second = interleaved ? 2 * j + 1 : j + at.pairs;
      const size_t angle = size_t(i / at.heads % at.tokens * at.pairs + j);
      const double a = row[first], b = row[second], sine = in_place ? s[angle] : -s[angle];
      row[first] = a * c[angle] - b * sine;
      row[second] = b * c[angle] + a * sine;
    }
    if (in_place) {
      std::copy(row.begin(), row.end(), wanted.begin() + i * head);
    } else {
      wanted.insert(wanted.end(), row.begin(), row.end());
    }
  }
  Rotary p;
  const int64_t step = in_place ? token : at.heads * at.dim;
  p.tokens.dtype = dtype;
  p.tokens.numel = all;
  p.tokens.dims = 2;
  p.tokens.sizes = {at.tokens, at.batch};
  p.tokens.operands[0] = {(in_place ? x : out).data(), {step, step * at.tokens}};
  p.tokens.operands[1] = {x.data(), {token, token * at.tokens}};
  p.tokens.operands[2] = {cosines.data(), {at.pairs, 0}};
  p.tokens.operands[3] = {sines.data(), {at.pairs, 0}};
  p.heads = at.heads;
  p.dim = at.dim;
  p.pairs = at.pairs;
  p.out_head = in_place ? head : at.dim;
  p.x_head = head;
  p.out_step = p.x_step = p.cos_step = p.sin_step = 1;
  p.dtype = dtype;
  p.table_dtype = table;
  p.interleaved = interleaved;
  p.inverse = !in_place;
  p.in_place = in_place;
  check(rotary_embedding_launch(p, nullptr), "launch");
  const double tolerance = dtype == DType::kFloat64    ? 1e-14
                           : dtype == DType::kFloat32  ? 1e-6
                           : dtype == DType::kBFloat16 ? 1e-2
                                                       : 1e-3;
  compare("rotary", (in_place ? x : out).values(), wanted, wanted.size(), tolerance);
}

struct Cache {
  int64_t tokens, blocks, block, heads, dim, gap;
};

void run_cache(std::mt19937& numbers, Cache at, DType dtype, DType cached, float scale) {
  const int64_t head = at.dim + at.gap, row = at.heads * head, slots = at.blocks * at.block;
  Tensor keys(dtype, size_t(at.tokens * row)), values(dtype, size_t(at.tokens * row));
  for (Tensor* one : {&keys, &values}) one->fill(numbers, 100);
  const size_t count = size_t(slots * at.heads * at.dim);
  std::vector<std::vector<uint8_t>> caches(2, std::vector<uint8_t>(count * 8 + 16, 0xFF));
  std::vector<int64_t> order(size_t(std::max(slots, at.tokens)));
  std::iota(order.begin(), order.end(), -1);  // -1, and perhaps some behind the end
  std::shuffle(order.begin(), order.end(), numbers);
  CacheWrite p;
  for (int k = 0; k < 2; ++k) {
    CacheRows& part = p.parts[k];
    part.rows = (k == 0 ? keys : values).data();
    part.cache = caches[k].data() + 16 - reinterpret_cast<uintptr_t>(caches[k].data()) % 16;
    part.scale = k == 0 && scale != 1 ? &scale : nullptr;
    part.heads = at.heads;
    part.dim = at.dim;
    part.token_step = row;
    part.row_head = head;
    part.row_step = part.cache_step = 1;
    part.cache_head = at.block * at.dim;  // heads before slots
    part.slot_step = at.dim;
    part.block_step = at.block * at.heads * at.dim;
    part.cache_dtype = cached;
    part.merge_heads();
  }
  p.slots = order.data();
  p.slots_step = 1;
  p.tokens = at.tokens;
  p.blocks = at.blocks;
  p.block = at.block;
  p.dtype = dtype;
  check(cache_write_launch(p, nullptr), "launch");
  const size_t bytes = size_t(size_of(cached));
  for (int k = 0; k < 2; ++k) {
    std::vector<uint8_t> wanted(count * bytes, 0xFF);
    for (int64_t token = 0; token < at.tokens; ++token) {
      const int64_t slot = order[size_t(token)];
      if (slot < 0 || slot >= slots) continue;
      for (int64_t h = 0; h < at.heads; ++h) {
        for (int64_t i = 0; i < at.dim; ++i) {
          double number = (k == 0 ? keys : values).get(size_t(token * row + h * head + i));
          if (k == 0 && scale != 1) number = float(number / scale);
          const int64_t place =
              ((slot / at.block * at.heads + h) * at.block + slot % at.block) * at.dim + i;
          uint8_t* const to = wanted.data() + size_t(place) * bytes;
          if (cached == DType::kFloat8E4M3) {
            *to = Float8E4M3::saturated(float(number)).bits;
          } else if (cached == DType::kFloat8E5M2) {
            *to = Float8E5M2::saturated(float(number)).bits;
          } else {
            Tensor one(cached, 1);
            one.set(0, number);
            std::memcpy(to, one.data(), bytes);
          }
        }
      }
    }
    if (std::memcmp(p.parts[k].cache, wanted.data(), wanted.size()) != 0) {
      std::printf("cache %d of %s is wrong: %s, %d tokens, dim %d\n", k, name(cached), name(dtype),
                  int(at.tokens), int(at.dim));
      std::exit(1);
    }
  }
}

// With numbers that 32 bits hold, and with more.
void run_division() {
  for (const int64_t divisor : {int64_t(1), int64_t(7), int64_t(4096), int64_t(INT32_MAX) + 2}) {
    for (const int64_t most : {int64_t(INT32_MAX), int64_t(1) << 40}) {
      const IndexDivider divide(divisor, most);
      for (const int64_t n : {int64_t(0), divisor - 1, divisor, most / 3, most}) {
        if (n > most || divide(n) == n / divisor) continue;
        fail("%lld / %lld is not %lld", (long long)n, (long long)divisor, (long long)divide(n));
      }
    }
  }
}

}  // namespace

int main(int count, char** texts) {
  const Arguments arguments(count, texts);
  std::mt19937 numbers(unsigned(arguments.number("seed")));
  run_division();
  const Heads heads[] = {{2, 3, 5, 32, 16, 0},  {1, 5, 3, 48, 16, 16},  {2, 2, 3, 14, 5, 3},
                         {1, 2, 1, 2, 1, 0},    {1, 2, 1, 3000, 16, 0}, {2, 40, 1, 16, 8, 8},
                         {1, 3, 70, 64, 32, 0}, {1, 2, 3, 24, 0, 0},    {1, 1, 2, 300, 150, 1}};
  const Cache caches[] = {{7, 2, 4, 1, 64, 0},   {9, 3, 3, 3, 16, 16},   {5, 1, 6, 2, 7, 0},
                          {3, 2, 2, 2, 1100, 4}, {300, 20, 16, 1, 8, 0}, {1, 1, 1, 2, 16, 0}};
  const DType floating[] = {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  for (const DType dtype : floating) {
    for (const bool option : {false, true}) {
      for (const bool in_place : {false, true}) {
        for (const Heads& at : heads) {
          run_rotary(numbers, at, dtype, dtype, option, in_place);
          if (size_of(dtype) == 2) {
            run_rotary(numbers, at, dtype, DType::kFloat32, option, in_place);
          }
        }
      }
    }
    for (const Cache& at : caches) {
      for (const DType cached : floating) {
        if (cached != DType::kFloat64) run_cache(numbers, at, dtype, cached, 0.3f);
        run_cache(numbers, at, dtype, cached, 1);
      }
      run_cache(numbers, at, dtype, DType::kFloat8E4M3, 0.3f);
      run_cache(numbers, at, dtype, DType::kFloat8E5M2, 1);
    }
  }
  return 0;
}
