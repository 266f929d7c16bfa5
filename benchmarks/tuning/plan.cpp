// Prints which kernel is chosen for given sizes on a GPU that need not be there. Compiles without
// CUDA:
//
//   c++ -std=c++17 -I src/utils -o /tmp/plan benchmarks/tuning/plan.cpp
//   /tmp/plan A100 matmul 512 10240 8192
//
// or one question a line on standard input. A device is A100, H100, H200, B200, or its capability,
// SMs and KB of shared memory per block, as in 8.9,142,99. Tensors are contiguous, and of bfloat16
// unless the question ends with another dtype:
//
//   matmul M N K [dtype [tf32 | tf32x3]]     (M, K) times (K, N)
//   linear M N K [dtype]                     (M, K) times the transpose of a weight (N, K)
//   moe tokens top_k hidden inner experts [dtype]
//   sort rows n [dtype]
//   topk rows n k [dtype]
//   sum rows n [dtype]
//   attention heads queries keys dim [dtype]
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "gemm/gemm.h"
#include "moe/moe_plan.h"
#include "reduce/reduce.h"
#include "sort/topk_select.h"

using namespace cuda_ops;

namespace {

// Where aligned memory could lie: plans look at addresses, and at nothing behind them.
void* const kAligned = reinterpret_cast<void*>(1024);

struct Question {
  DeviceInfo device;
  std::vector<int64_t> sizes;
  DType dtype = DType::kBFloat16;
  Precision precision = Precision::kIeee;
};

std::string of_matmul(const Question& q, bool linear) {
  Matmul p;
  p.m = q.sizes[0], p.n = q.sizes[1], p.k = q.sizes[2];
  p.out = {p.n, 1};
  p.a = {p.k, 1};
  p.b = linear ? MatrixStrides{1, p.k} : MatrixStrides{p.n, 1};
  p.batch.dtype = q.dtype;
  p.batch.numel = 1;
  for (Operand& operand : p.batch.operands) operand.data = kAligned;
  p.precision = q.precision;
  p.built_for_hopper = true;
  return gemm_plan(p, q.device, linear).text();
}

std::string of_moe(const Question& q) {
  MoeExpertsBackward b;
  MoeExperts& p = b.forward;
  p.dtype = q.dtype;
  p.tokens = q.sizes[0], p.top_k = q.sizes[1], p.hidden = q.sizes[2], p.inner = q.sizes[3];
  p.map.experts = q.sizes[4];
  p.map.assignments = p.tokens * p.top_k;
  p.built_for_hopper = true;
  return moe_plan(p, q.device).text() + ", backward " + moe_plan(b, q.device).text();
}

std::string of_sort(const Question& q) {
  // How many clusters of 16 blocks run at once differs from chip to chip: 7 is a guess.
  const bool hopper = q.device.capability == 90;
  const SortConfig c =
      sort_config(q.sizes[0], q.sizes[1], size_of(q.dtype), q.device, {hopper, hopper ? 7 : 0});
  const char* const paths[] = {"nothing", "warp", "block", "cluster", "radix"};
  std::string text = paths[c.path];
  if (c.path == SortConfig::kWarp) text += " width " + std::to_string(c.width);
  if (c.path == SortConfig::kCluster) text += " of " + std::to_string(c.cluster);
  return text + " grid " + std::to_string(c.blocks);
}

std::string of_topk(const Question& q) {
  const int64_t rows = q.sizes[0], n = q.sizes[1], k = q.sizes[2], size = size_of(q.dtype);
  if (topk_sorts(n, k)) return "warp sort";
  if (topk_selects(rows, n, k, size, q.device)) {
    return "select chunks " + std::to_string(select_config(rows, n, k, size, q.device).chunks);
  }
  if (k > kMostKept) return "bitonic_sort";
  const TopkConfig c = topk_config(rows, n, k, q.device);
  return "kept " + std::to_string(c.kept) + " chunks " + std::to_string(c.chunks);
}

std::string of_sum(const Question& q) {
  RowSums p;
  p.rows.dtype = q.dtype;
  p.rows.numel = 1;
  p.rows.add_dim(q.sizes[0], q.sizes[1]);
  p.n = q.sizes[1];
  const RowSumsConfig c = row_sums_config(p, q.device);
  return "lanes " + std::to_string(c.lanes) + " splits " + std::to_string(c.splits) + " grid " +
         std::to_string(c.blocks);
}

// For dense heads; a block of Hopper's kernels and of `mma` has 128 queries.
std::string of_attention(const Question& q) {
  Attention p;
  p.heads.dtype = q.dtype;
  p.heads.numel = p.heads.sizes[0] = q.sizes[0];
  p.heads.dims = 1;
  p.shape.queries = q.sizes[1], p.shape.keys = q.sizes[2], p.shape.dim = int(q.sizes[3]);
  p.shape.scale = 1;
  p.shape.vectors = p.shape.dim * size_of(q.dtype) % 16 == 0;
  p.q_step = p.k_step = p.v_step = p.shape.dim;
  p.may_use_hopper = true;
  const AttentionPlan plan = attention_plan(p, q.device);
  const char* kernel = attention_few(p.shape.queries) ? "few" : plan.hopper ? "hopper" : "mma";
  const std::string splits = std::to_string(plan.splits) + " of " + std::to_string(plan.keys);
  return std::string(kernel) + " splits " + splits;
}

std::string answer(std::istream& words) {
  Question q;
  std::string device, op, word;
  words >> device >> op;
  if (!device_named(device.c_str(), q.device)) return "no such device: " + device;
  while (words >> word) {
    DType dtype = DType(0);
    while (dtype != DType::kUnsupported && word != name(dtype)) dtype = DType(int(dtype) + 1);
    if (word.find_first_not_of("0123456789") == std::string::npos) {
      q.sizes.push_back(std::stoll(word));
    } else if (word == "tf32" || word == "tf32x3") {
      q.precision = word == "tf32" ? Precision::kTF32 : Precision::kTF32x3;
    } else if (dtype != DType::kUnsupported) {
      q.dtype = dtype;
    } else {
      return "no such dtype: " + word;
    }
  }
  const auto is = [&](const char* wanted, size_t sizes) {
    return op == wanted && q.sizes.size() == sizes;
  };
  if (is("matmul", 3) || is("linear", 3)) return of_matmul(q, op == "linear");
  if (is("moe", 5)) return of_moe(q);
  if (is("sort", 2)) return of_sort(q);
  if (is("topk", 3)) return of_topk(q);
  if (is("sum", 2)) return of_sum(q);
  if (is("attention", 4)) return of_attention(q);
  return "expected matmul M N K, linear M N K, moe tokens top_k hidden inner experts, sort rows n, "
         "topk rows n k, sum rows n or attention heads queries keys dim";
}

}  // namespace

int main(int count, char** arguments) {
  std::string line;
  for (int i = 1; i < count; ++i) line += std::string(arguments[i]) + " ";
  if (!line.empty()) {
    std::istringstream words(line);
    std::cout << answer(words) << "\n";
    return 0;
  }
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    std::cout << answer(words) << "\n";
  }
}
