// Tokens sent to several ranks: every width of an access, one load a thread and several, no bytes
// at all, and more chunks than blocks.
#include <cstring>

#include "cases.h"

#include "moe_send_.cu"

using namespace cuda_ops;
using namespace emulator;

namespace {

constexpr int64_t kBeside = 64;  // bytes on both sides of what is written
constexpr uint8_t kUntouched = 0xAB;

// Bytes that begin `start` bytes after a multiple of 16.
class Bytes {
 public:
  Bytes(int64_t count, int64_t start) : memory_(size_t(count + 2 * kBeside + 32), kUntouched) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(memory_.data()) + 15;
    data_ = reinterpret_cast<uint8_t*>(begin & ~uintptr_t(15)) + kBeside + start;
  }
  uint8_t* data() const { return data_; }

 private:
  std::vector<uint8_t> memory_;
  uint8_t* data_;
};

struct Case {
  int64_t tokens, hidden, top_k;
  int ranks;
  int64_t skipped;  // elements before what the last rank gets
};

// Fails unless a part arrived, and nothing beside it was written.
void compare(const Case& at, const char* name, const Bytes& found,
             const std::vector<uint8_t>& wanted) {
  const uint8_t* const data = found.data();
  bool right = wanted.empty() || std::memcmp(data, wanted.data(), wanted.size()) == 0;
  for (int64_t i = 0; i < 16; ++i) {
    right = right && data[-1 - i] == kUntouched && data[int64_t(wanted.size()) + i] == kUntouched;
  }
  if (right) return;
  fail("%s of %d tokens, hidden %d, k %d, %d ranks, %d skipped", name, int(at.tokens),
       int(at.hidden), int(at.top_k), at.ranks, int(at.skipped));
}

void run(std::mt19937& numbers, const Case& at) {
  MoeSend p;
  p.ranks = at.ranks;
  for (int r = 0; r < at.ranks; ++r) p.firsts[r] = int64_t(r) * 1000003 - 5;
  const char* const names[] = {"x", "experts", "weights"};
  SendPart* const parts[] = {&p.x, &p.experts, &p.weights};
  const int64_t elements[] = {at.tokens * at.hidden, at.tokens * at.top_k, at.tokens * at.top_k};
  const int64_t size[] = {2, 8, 4};
  std::vector<Bytes> from, to;
  for (int k = 0; k < 3; ++k) {
    const int64_t bytes = elements[k] * size[k];
    from.emplace_back(bytes, 0);
    for (int64_t i = 0; i < bytes; ++i) from[k].data()[i] = uint8_t(numbers());
    allow_reads(from[k].data(), size_t(bytes));
    parts[k]->from = from[k].data();
    parts[k]->bytes = bytes;
    for (int r = 0; r < at.ranks; ++r) {
      to.emplace_back(bytes, r == at.ranks - 1 ? at.skipped * size[k] : 0);
      parts[k]->to[r] = to.back().data();
    }
  }
  check(moe_send_launch(p, nullptr), "moe_send_launch");
  for (int k = 0; k < 3; ++k) {
    for (int r = 0; r < at.ranks; ++r) {
      const uint8_t* const sent = from[k].data();
      std::vector<uint8_t> wanted(sent, sent + parts[k]->bytes);
      for (int64_t i = 0; k == 1 && i < elements[k]; ++i) {
        int64_t expert;
        std::memcpy(&expert, sent + 8 * i, 8);
        expert = int64_t(uint64_t(expert) - uint64_t(p.firsts[r]));
        std::memcpy(wanted.data() + 8 * i, &expert, 8);
      }
      compare(at, names[k], to[size_t(k * at.ranks + r)], wanted);
    }
  }
}

}  // namespace

int main(int count, char** texts) {
  const Arguments arguments(count, texts);
  std::mt19937 numbers(unsigned(arguments.number("seed")));
  for (const int64_t tokens : {0, 1, 3, 64, 129}) {
    for (const int64_t hidden : {0, 7, 8, 34, 2050}) {
      for (const int64_t top_k : {0, 1, 3, 8}) {
        for (const int ranks : {1, 3, kMostRanks}) {
          for (const int64_t skipped : {0, 1, 2, 4}) {
            if (tokens * hidden * ranks > 1 << 20 && (skipped > 0 || top_k != 8)) continue;
            run(numbers, {tokens, hidden, top_k, ranks, skipped});
          }
        }
      }
    }
  }
  run(numbers, {2900, 2048, 8, 2, 0});
  run(numbers, {700, 1024, 2, 1, 1});
  return 0;
}
