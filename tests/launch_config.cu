// Prints the launch configurations of a few problems, one line each. They are values chosen without
// a GPU; test_launch_config.py says what they should be.
#include "../src/kernels/normalize_volume.cu"
// Both files define this name.
#define kThreads kGrayThreads
#include "../src/kernels/rgb_to_gray.cu"
#undef kThreads

#include <cstdio>
#include <vector>

#include "cache/cache_write.h"
#include "elementwise.cuh"
#include "moe/moe_send.h"
#include "reduce/reduce.h"
#include "rotary/rotary.h"
#include "sort/topk_select.h"

namespace {

void* address(int64_t misaligned) { return reinterpret_cast<void*>(4096 + misaligned); }

void elementwise(const char* name, int64_t rows, int64_t columns, int64_t row_stride,
                 int64_t misaligned, DType dtype) {
  Strided<1> p;
  p.dtype = dtype;
  p.numel = rows * columns;
  p.dims = 2;
  p.sizes = {columns, rows};
  p.operands[0] = {address(0), {1, columns}};
  p.operands[1] = {address(misaligned), {1, row_stride}};
  p.coalesce();
  const auto c = elementwise_config(p, int(size_of(dtype)));
  const char* paths[] = {"flat", "small", "rows", "points"};
  std::printf("%s: %s, unroll %d, tile %lld, blocks %lld\n", name, paths[c.path], c.unroll,
              (long long)c.tile, (long long)c.blocks);
}

const DeviceInfo kH200 = [] {
  DeviceInfo info;
  device_named("H200", info);
  return info;
}();

void rows(const char* name, int64_t count, int64_t n, int64_t stride, DType dtype) {
  RowSums p;
  p.rows.dtype = dtype;
  p.rows.add_dim(count, stride == 1 ? n : 1);
  p.n = n;
  p.stride = stride;
  const auto c = row_sums_config(p, kH200);
  std::printf("%s: %s, lanes %d, splits %lld, blocks %lld\n", name,
              c.path == RowSumsConfig::kStrided ? "strided" : "runs", c.lanes, (long long)c.splits,
              (long long)c.blocks);
}

void gray(const char* name, int64_t pixels, int64_t step, int64_t channel, int64_t misaligned) {
  RgbToGray p;
  p.pixels.data = address(misaligned);
  p.pixels.dtype = DType::kUInt8;
  p.pixels.add_dim(pixels, step);
  p.channel = channel;
  const auto c = rgb_to_gray_config(p);
  const char* paths[] = {"interleaved", "planar", "scalar"};
  std::printf("%s: %s, pixels %d, blocks %lld\n", name, paths[c.path], c.pixels,
              (long long)c.blocks);
}

void volume(const char* name, int64_t volumes, int64_t each, bool own_statistics,
            int64_t misaligned) {
  NormalizeVolume p;
  p.voxels.data = address(misaligned);
  p.voxels.dtype = DType::kUInt16;
  p.voxels.add_dim(volumes * each, 1);
  p.volumes = volumes;
  p.each = each;
  p.own_statistics = own_statistics;
  const auto c = normalize_config(p, kH200);
  std::printf("%s: %s, unroll %d, team %lld, blocks %lld\n", name, c.packed ? "packed" : "scalar",
              c.unroll, (long long)c.team, (long long)c.blocks);
}

void topk(const char* name, int64_t count, int64_t n, int64_t k) {
  const auto c = topk_config(count, n, k, kH200);
  std::printf("%s: kept %d, chunk %lld, chunks %lld, pieces %lld by %lld, workspace %lld\n", name,
              c.kept, (long long)c.chunk, (long long)c.chunks, (long long)c.pieces,
              (long long)c.step, (long long)topk_workspace_bytes(count, n, k, 4, kH200));
}

// Walks through the pieces of chunks of every length, as a warp does.
void steps(const char* name, int64_t most) {
  int64_t missed = 0, best_so_far = 0;
  for (int64_t pieces = 1; pieces <= most; ++pieces) {
    const int64_t step = topk_step(pieces);
    std::vector<bool> met(size_t(pieces), false);
    int64_t highest = -1, ascending = 0;
    for (int64_t i = 0, piece = 0; i < pieces; ++i, piece = (piece + step) % pieces) {
      met[size_t(piece)] = true;
      ascending += piece > highest;
      highest = piece > highest ? piece : highest;
    }
    for (const bool one : met) missed += !one;
    best_so_far = ascending > best_so_far ? ascending : best_so_far;
  }
  std::printf("%s: missed %lld, best of all so far at most %lld times\n", name, (long long)missed,
              (long long)best_so_far);
}

void select(const char* name, int64_t count, int64_t n, int64_t k, int64_t size,
            const DeviceInfo& device = kH200) {
  if (!topk_selects(count, n, k, size, device)) {
    std::printf("%s: not selected\n", name);
    return;
  }
  std::printf("%s:", name);
  for (int64_t left = n, chunks = 0; chunks != 1; left = chunks * k) {
    const auto c = select_config(count, left, k, size, device);
    chunks = c.chunks;
    std::printf(" chunks %lld, list %d, sample %d, guess %d, threads %d;", (long long)chunks,
                c.list, c.sample_bits > 0 ? 1 << c.sample_bits : 0, c.guess, c.threads);
  }
  std::printf(" workspace %lld\n", (long long)select_workspace_bytes(count, n, k, size, device));
}

void rotary(const char* name, int64_t tokens, int64_t heads, int64_t dim, int64_t pairs,
            bool in_place, int64_t misaligned, DType dtype, DType table) {
  Rotary p;
  p.dtype = p.tokens.dtype = dtype;
  p.table_dtype = table;
  p.tokens.numel = tokens;
  p.tokens.dims = 1;
  p.tokens.sizes = {tokens};
  p.tokens.operands[0] = {address(0), {heads * dim}};
  p.tokens.operands[1] = {address(misaligned), {heads * dim}};
  p.tokens.operands[2] = p.tokens.operands[3] = {address(0), {pairs}};
  p.heads = heads;
  p.dim = p.out_head = p.x_head = dim;
  p.pairs = pairs;
  p.out_step = p.x_step = p.cos_step = p.sin_step = 1;
  p.in_place = in_place;
  const auto c = rotary_config(p, kH200);
  std::printf("%s: pack %d, units %lld, heads %d, %d x %d threads, blocks %lld\n", name, c.pack,
              (long long)c.units, c.heads, c.rows, c.lanes, (long long)c.blocks);
}

void cache(const char* name, int64_t tokens, int64_t heads, int64_t dim, bool heads_first,
           int64_t misaligned, DType cached) {
  CacheWrite p;
  p.tokens = tokens;
  p.blocks = 4096;
  p.block = 16;
  p.dtype = DType::kBFloat16;
  CacheRows& part = p.parts[0];
  part.rows = address(misaligned);
  part.cache = address(0);
  part.heads = heads;
  part.dim = part.row_head = dim;
  part.token_step = heads * dim;
  part.block_step = 16 * heads * dim;
  part.slot_step = heads_first ? dim : heads * dim;
  part.cache_head = heads_first ? 16 * dim : dim;
  part.row_step = part.cache_step = 1;
  part.cache_dtype = cached;
  part.merge_heads();
  p.parts[1] = part;
  const auto c = cache_config(p, 0, 2);
  std::printf("%s: heads %lld, pack %d, packs %lld, %d x %d, parts %lld, blocks %lld\n", name,
              (long long)part.heads, c.pack, (long long)c.packs, c.rows, c.lanes,
              (long long)c.parts, (long long)c.blocks);
}

void send(const char* name, int64_t tokens, int64_t hidden, int64_t top_k, int64_t misaligned) {
  MoeSend p;
  p.ranks = 2;
  p.x.bytes = tokens * hidden * 2;
  p.experts.bytes = tokens * top_k * 8;
  p.weights.bytes = tokens * top_k * 4;
  for (SendPart* part : {&p.x, &p.experts, &p.weights}) {
    part->from = part->to[0] = address(0);
    part->to[1] = address(part == &p.x ? misaligned : 0);
  }
  const auto c = send_config(p, kH200.sms);
  std::printf("%s: loads %d, widths %d, %d and %d, chunks %lld, blocks %lld\n", name, c.loads,
              c.x.width, c.experts.width, c.weights.width, (long long)c.chunks,
              (long long)c.blocks);
}

}  // namespace

int main() {
  const int64_t M = 1 << 20;
  elementwise("dense f32 1K", 1, 1024, 1024, 0, DType::kFloat32);
  elementwise("dense f32 256M", 1, 256 * M, 256 * M, 0, DType::kFloat32);
  elementwise("dense bf16 1M", 1, M, M, 0, DType::kBFloat16);
  elementwise("dense bf16 16K", 1, M >> 6, M >> 6, 0, DType::kBFloat16);
  elementwise("dense, off by one", 1, M, M, 4, DType::kFloat32);
  elementwise("rows of a wider matrix", 4096, 1024, 2048, 0, DType::kFloat32);
  elementwise("rows of an odd width", 4096, 1023, 2048, 0, DType::kFloat32);
  rows("many short rows", 1 << 20, 31, 1, DType::kFloat32);
  rows("rows of 16 KB", 4096, 4096, 1, DType::kFloat32);
  rows("few rows of 16 KB", 16, 4096, 1, DType::kFloat32);
  rows("32 long rows", 32, 2 * M, 1, DType::kFloat32);
  rows("one row of 1 KB", 1, 256, 1, DType::kFloat32);
  rows("columns", 4096, 4096, 4096, DType::kFloat32);
  gray("720p", 720 * 1280, 3, 1, 0);
  gray("8K", 4320 * 7680, 3, 1, 0);
  gray("planar 720p", 720 * 1280, 1, 720 * 1280, 0);
  gray("off by one byte, gray", 720 * 1280, 3, 1, 1);
  gray("nothing", 0, 3, 1, 0);
  volume("64^3 by a maximum", 1, 64 * 64 * 64, false, 0);
  volume("128^3 by a maximum", 1, 2 * M, false, 0);
  volume("512^3 by a maximum", 1, 128 * M, false, 0);
  volume("64^3 by its own statistics", 1, 64 * 64 * 64, true, 0);
  volume("512^3 by its own statistics", 1, 128 * M, true, 0);
  volume("1000 of 8^3", 1000, 512, true, 0);
  volume("2000 of 8^3", 2000, 512, true, 0);
  volume("off by one byte, volume", 1, 64 * 64 * 64, true, 2);
  topk("8 of 64 for many rows", 1 << 16, 64, 8);
  topk("64 of one row of 1M", 1, M, 64);
  topk("50 of a vocabulary", 64, 131072, 50);
  topk("0 of nothing", 0, 0, 0);
  steps("pieces of an ascending row", 2000);
  select("64 of 2000, which a warp keeps", 100, 2000, 64, 4);
  select("512 of a vocabulary", 64, 131072, 512, 4);
  select("512 of a vocabulary in float64", 64, 131072, 512, 8);
  select("512 of many rows", 1024, 32768, 512, 4);
  select("2048 of many rows", 1024, 32768, 2048, 4);
  select("256 of rows of 4096", 4096, 4096, 256, 4);
  select("half of rows of 4096", 4096, 4096, 2048, 4);
  select("65 of rows of 1025", 1 << 14, 1025, 65, 2);
  select("512 of one row of 16M", 1, 16 * M, 512, 4);
  select("8192 of many long rows", 1024, 131072, 8192, 4);
  select("8192 in less shared memory", 1024, 131072, 8192, 4, {89, 142, 99 * 1024});
  select("more than a block sorts", 64, 131072, 20000, 4);
  select("100 of no rows", 0, 5000, 100, 4);
  const DType half = DType::kBFloat16, wide = DType::kFloat32;
  rotary("40 heads", 1 << 14, 40, 128, 64, false, 0, half, half);
  rotary("40 heads, tables in float32", 1 << 14, 40, 128, 64, false, 0, half, wide);
  rotary("40 heads of one token", 1, 40, 128, 64, false, 0, half, half);
  rotary("one head", 1 << 16, 1, 64, 32, false, 0, half, half);
  rotary("a quarter of each head", 1 << 14, 64, 96, 12, false, 0, half, half);
  rotary("a quarter of each head in place", 1 << 14, 64, 96, 12, true, 0, half, half);
  rotary("heads off by one", 1 << 14, 40, 128, 64, false, 2, half, half);
  rotary("heads of an odd width", 1 << 14, 3, 33, 10, false, 0, wide, wide);
  rotary("nothing turned in place", 1 << 14, 3, 33, 0, true, 0, wide, wide);
  cache("8 heads a slot", 1 << 14, 8, 128, false, 0, half);
  cache("8 heads a slot in eight bits", 1 << 14, 8, 128, false, 0, DType::kFloat8E4M3);
  cache("8 heads a slot in float32", 1 << 14, 8, 128, false, 0, wide);
  cache("heads before slots", 1 << 14, 8, 128, true, 0, half);
  cache("one head a slot", 1000, 1, 64, true, 0, half);
  cache("rows off by one", 1 << 14, 8, 128, false, 2, half);
  cache("no tokens", 0, 8, 128, false, 0, half);
  send("64 tokens", 64, 2048, 8, 0);
  send("8192 tokens", 8192, 2048, 8, 0);
  send("8192 tokens, off by one element", 8192, 2048, 8, 2);
  send("one choice of 63 tokens, odd rows", 63, 2049, 1, 0);
  send("8192 tokens, off by 8 bytes", 8192, 2048, 8, 8);
  send("no tokens to send", 0, 2048, 8, 0);
}
