// Tunes the matrix product on Hopper: times every tile, swap and split that its kernel can run, and
// those that stream a matrix past up to 32 rows, bfloat16, a @ weight^T, on the projections of
// Llama-3 8B and 70B, on cubes and on odd sizes, beside the plan's choice and cuBLAS. Then prints
// what hopper_stage_time and its neighbors, and the estimates for copies and 3xTF32, should be.
// Operands rotate through 6 GiB of N(0, 1), so the L2 is cold; launches come from CUDA graphs that
// take turns. Under two minutes on an H200.
//
//   nvcc -std=c++17 --expt-relaxed-constexpr -gencode=arch=compute_90a,code=sm_90a
//        -I src/utils -o /tmp/tiles benchmarks/tuning/matmul.cu -ldl && /tmp/tiles
//
// `/tmp/tiles all` prints every variant. cuBLAS takes part if the loader finds
// libcublas.so.13 (or .12), for example through LD_LIBRARY_PATH.
// Streams that no plan chooses on Hopper are timed too.
#define CUDA_OPS_EVERY_KERNEL

#include <dlfcn.h>
#include <library_types.h>

#include <map>
#include <string>

#include "gemm/gemm.h"
#include "gemm/gemm_hopper.cuh"
#include "gemm/gemm_pack.cuh"
#include "gemm/gemm_stream.cuh"
#include "ptx/capability.h"
#include "race.cuh"

using namespace cuda_ops;

namespace {

// Results have memory of their own: products of products would end in infinities.
constexpr int64_t kInputs = int64_t(6) << 30, kResults = int64_t(2) << 30;

// --- cuBLAS, without its headers ------------------------------------------------

struct Cublas {
  using Create = int (*)(void**);
  using SetStream = int (*)(void*, cudaStream_t);
  using SetWorkspace = int (*)(void*, void*, size_t);
  using Gemm = int (*)(void*, int, int, int, int, int, const void*, const void*, cudaDataType, int,
                       const void*, cudaDataType, int, const void*, void*, cudaDataType, int, int,
                       int);
  void* handle = nullptr;
  Gemm gemm = nullptr;

  explicit Cublas(cudaStream_t stream) {
    void* library = dlopen("libcublas.so.13", RTLD_NOW);
    if (library == nullptr) library = dlopen("libcublas.so.12", RTLD_NOW);
    if (library == nullptr) return;
    const auto create = reinterpret_cast<Create>(dlsym(library, "cublasCreate_v2"));
    const auto set_stream = reinterpret_cast<SetStream>(dlsym(library, "cublasSetStream_v2"));
    const auto set_workspace =
        reinterpret_cast<SetWorkspace>(dlsym(library, "cublasSetWorkspace_v2"));
    gemm = reinterpret_cast<Gemm>(dlsym(library, "cublasGemmEx"));
    constexpr size_t kWorkspace = size_t(32) << 20;
    void* workspace = nullptr;
    check(cudaMalloc(&workspace, kWorkspace), "cuBLAS workspace");
    // Without a workspace of its own it would allocate, which a capture forbids.
    const bool ready = create(&handle) == 0 && set_stream(handle, stream) == 0 &&
                       set_workspace(handle, workspace, kWorkspace) == 0;
    if (!ready) gemm = nullptr;
  }

  // out = a @ b, both K-major; cuBLAS takes matrices by columns.
  bool run(const Matmul& p) const {
    constexpr int kNone = 0, kTransposed = 1, kComputeFloat = 68, kDefault = -1;
    const float one = 1, zero = 0;
    const auto& operands = p.batch.operands;
    return gemm(handle, kTransposed, kNone, int(p.n), int(p.m), int(p.k), &one, operands[2].data,
                CUDA_R_16BF, int(p.b.col), operands[1].data, CUDA_R_16BF, int(p.a.row), &zero,
                operands[0].data, CUDA_R_16BF, int(p.out.row), kComputeFloat, kDefault) == 0;
  }
};

// --- variants -------------------------------------------------------------------

struct Memory {
  char *inputs, *results;
};

// Products of one size, a @ b of dense K-major operands, which take turns in the memory.
struct Products {
  Memory memory;
  int64_t m, n, k;
  DType dtype;
  int64_t copies = 0;  // bytes behind each result

  int64_t whole(int64_t numel) const { return (numel * size_of(dtype) + 255) / 256 * 256; }
  int64_t input_bytes() const { return whole(m * k) + whole(n * k); }
  int64_t result_bytes() const { return whole(m * n) + copies; }
  double bytes() const { return double(m * k + n * k + m * n) * double(size_of(dtype)); }
  int sets() const {
    const int64_t most = std::min(kInputs / input_bytes(), kResults / result_bytes());
    return int(std::clamp<int64_t>(most, 1, 64));
  }
  char* copies_at(int set) const { return memory.results + set * result_bytes() + whole(m * n); }

  Matmul at(int set) const {
    Matmul p;
    p.m = m, p.n = n, p.k = k;
    p.out = {n, 1};
    p.a = {k, 1};
    p.b = {1, k};
    p.batch.dtype = dtype;
    p.batch.numel = 1;
    p.built_for_hopper = true;
    char* inputs = memory.inputs + set * input_bytes();
    p.batch.operands[1].data = inputs;
    p.batch.operands[2].data = inputs + whole(m * k);
    p.batch.operands[0].data = memory.results + set * result_bytes();
    return p;
  }
};

cudaError_t run_variant(const Matmul& p, const HopperConfig& config, cudaStream_t stream) {
  return gemm_hopper<BFloat16, false>(p, config, PlainEpilogue{}, nullptr, stream);
}

// Returns the variants that the kernel can run, far beyond those that the plan considers.
std::vector<HopperConfig> variants(const Matmul& p) {
  std::vector<HopperConfig> all;
  for (const int tile_n : {16, 32, 64, 128, 160, 192, 224, 256}) {
    const bool narrow = tile_n < 128;
    for (const bool swap : {false, true}) {
      if (swap && !narrow) continue;
      // Columns in more than four narrow tiles: the other operand is read over and over,
      // which small problems of many blocks may afford.
      const bool small =
          hopper_variant(p, 2, current_device(), swap, tile_n, 1).tiles <= 2 * current_device().sms;
      if (narrow && (swap ? p.m : p.n) > 4 * tile_n && !(tile_n == 64 && small)) continue;
      for (const int splits : {1, 2, 3, 4, 6, 8}) {
        if (splits > 1 && ceil_div(p.k, 64) < 2 * splits) continue;
        const HopperConfig config = hopper_variant(p, 2, current_device(), swap, tile_n, splits);
        // In one wave: two narrow blocks share an SM.
        if (splits > 1 && config.grid > (narrow ? 2 : 1) * current_device().sms) continue;
        if (config.possible) all.push_back(config);
      }
      if (!narrow && p.m > kHopperTileM) {
        all.push_back(hopper_variant(p, 2, current_device(), swap, tile_n, 1, true));
      }
    }
  }
  return all;
}

struct Measured {
  Matmul p;
  HopperConfig config;
  double time;
};

struct Shape {
  int64_t m, n, k;
};

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  const int64_t projections[][2] = {{6144, 4096},  {4096, 4096},  {14336, 4096}, {28672, 4096},
                                    {4096, 14336}, {10240, 8192}, {8192, 8192},  {28672, 8192},
                                    {57344, 8192}, {8192, 28672}};
  for (const auto& projection : projections) {
    for (const int m : {1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192}) {
      all.push_back({m, projection[0], projection[1]});
    }
  }
  for (const int side : {512, 768, 1024, 1536, 2048, 3072, 4096, 8192}) {
    all.push_back({side, side, side});
  }
  // One tile, and one of each SM: what a launch, its start and its end take.
  for (const int side : {128, 1024}) {
    for (const int k : {64, 256, 1024}) all.push_back({side, side, k});
  }
  for (const Shape& odd : {Shape{24, 6144, 4096},
                           {40, 28672, 4096},
                           {48, 10240, 8192},
                           {100, 4104, 4096},
                           {200, 14336, 4096},
                           {300, 4096, 4096},
                           {300, 5000, 2056},
                           {777, 1032, 8192},
                           {1000, 1000, 1000},
                           {1000, 3000, 1000},
                           {1000, 4096, 14336},
                           {2050, 2050, 2048},
                           {4100, 4100, 4096}}) {
    all.push_back(odd);
  }
  return all;
}

// --- the tables -----------------------------------------------------------------

std::vector<Measured> race_tiles(const Memory& memory, const Cublas& cublas, cudaStream_t stream,
                                 bool print_all) {
  std::vector<Measured> results;
  std::map<int64_t, std::vector<double>> lost;  // by m: logarithms of chosen / best
  std::printf("%6s %6s %6s  %-34s %9s  %-34s %9s %9s  %6s %6s\n", "M", "N", "K", "chosen", "us",
              "best", "us", "cuBLAS us", "best", "cuBLAS");
  for (const auto& [m, n, k] : shapes()) {
    const Products products{memory, m, n, k, DType::kBFloat16};
    const Matmul p = products.at(0);
    const GemmPlan chosen = gemm_plan(p, current_device());
    const double estimate =
        chosen.family == GemmPlan::kHopper ? chosen.hopper.time : products.bytes() / 4.0e6;
    std::vector<std::string> ran;
    std::vector<HopperConfig> configs;
    Race race(stream);
    const auto enter = [&](const std::string& name, const auto& run) {
      const bool runs = race.add(products.sets(), calls_of(estimate),
                                 [&](int set) { return run(products.at(set)); });
      if (runs) ran.push_back(name);
      return runs;
    };
    for (const HopperConfig& config : variants(p)) {
      const auto run = [&](const Matmul& q) {
        return run_variant(q, config, stream) == cudaSuccess;
      };
      if (enter("hopper " + config.text(), run)) configs.push_back(config);
    }
    if (std::min(p.m, p.n) <= stream_vectors(false, p.k)) {
      for (const int splits : {2, 4, 8}) {
        const StreamConfig config = stream_variant(p, splits);
        enter("stream " + config.text(), [&](const Matmul& q) {
          return gemm_stream<BFloat16>(q, config, PlainEpilogue{}, nullptr, stream) == cudaSuccess;
        });
      }
    }
    const size_t ours = ran.size();
    if (ours == 0) continue;
    if (cublas.gemm != nullptr) enter("cuBLAS", [&](const Matmul& q) { return cublas.run(q); });
    const std::vector<double> times = race.run();
    for (size_t i = 0; i < configs.size(); ++i) results.push_back({p, configs[i], times[i]});

    size_t best = 0;
    double chosen_time = NAN;
    for (size_t i = 0; i < ours; ++i) {
      if (times[i] < times[best]) best = i;
      if (ran[i] == chosen.text()) chosen_time = times[i];
      if (print_all) std::printf("%60s %9.2f us\n", ran[i].c_str(), times[i]);
    }
    const double theirs = ran.size() > ours ? times[ours] : NAN;
    if (!std::isnan(chosen_time)) lost[p.m].push_back(std::log(chosen_time / times[best]));
    std::printf("%6lld %6lld %6lld  %-34s %9.2f  %-34s %9.2f %9.2f  %5.2fx %5.2fx\n",
                static_cast<long long>(p.m), static_cast<long long>(p.n),
                static_cast<long long>(p.k), chosen.text().c_str(), chosen_time, ran[best].c_str(),
                times[best], theirs, times[best] / chosen_time, theirs / chosen_time);
    std::fflush(stdout);
  }
  std::printf("\nchosen over best, geometric mean by M:");
  for (const auto& [m, logs] : lost) {
    double sum = 0;
    for (const double log : logs) sum += log;
    std::printf(" %lld: %.3f", static_cast<long long>(m), std::exp(sum / double(logs.size())));
  }
  std::printf("\n");
  return results;
}

// Prints the constants of hopper_estimate that these times imply: medians, of one split first.
void refit(const std::vector<Measured>& results) {
  std::printf("\nestimated: start and end %.1f us, exchange %.1f us, L2 %.1f TB/s\n",
              kHopperFixedTime, kHopperExchangeTime, kHopperL2);
  std::printf("%6s %12s %16s %16s %16s   exchange us by splits\n", "tile_n", "us per stage",
              "measured", "L2 TB/s", "start and end");
  const auto print = [](const std::vector<double>& values) {
    std::printf(" %9.3f (%4zu)", median(values), values.size());
  };
  for (const int tile_n : {16, 32, 64, 128, 160, 192, 224, 256}) {
    std::vector<double> stage_times, rates, fixed;
    std::map<int, std::vector<double>> exchanges;
    double fitted = hopper_stage_time(tile_n);
    for (const int pass : {0, 1}) {
      for (const auto& [p, config, time] : results) {
        if (config.tile_n != tile_n || (config.splits == 1) != (pass == 0)) continue;
        const auto stages = double(ceil_div(p.k, 64)) / config.splits;
        const auto waves = double(ceil_div(config.tiles * config.splits, current_device().sms));
        const double all = Products{{}, p.m, p.n, p.k, p.batch.dtype}.bytes() / 4.0e6;
        const double loads = hopper_load_time(p, config, 2, current_device());
        const double busy = waves * (stages * std::max(fitted, loads) + 0.5);
        // Products that wait for memory teach nothing here.
        if (busy < 1.3 * all) continue;
        const double stage = ((time - kHopperFixedTime) / waves - 0.5) / stages;
        if (pass == 1) {
          exchanges[config.splits].push_back(time - kHopperFixedTime - busy);
        } else if (stages * waves <= 16) {
          fixed.push_back(time - busy);
        } else if (loads > fitted) {
          rates.push_back(kHopperL2 * loads / stage);
        } else {
          stage_times.push_back(stage);
        }
      }
      if (pass == 0 && !stage_times.empty()) fitted = median(stage_times);
    }
    std::printf("%6d %12.3f  ", tile_n, hopper_stage_time(tile_n));
    print(stage_times);
    print(rates);
    print(fixed);
    std::printf("  ");
    for (const auto& [splits, times] : exchanges) {
      std::printf(" %d: %.1f (%zu)", splits, median(times), times.size());
    }
    std::printf("\n");
  }
}

// Times copies of operands of 4096 lines, and the product of split ones.
void time_copies(const Memory& memory, cudaStream_t stream) {
  constexpr int64_t kSide = 4096;
  std::printf("\n%-40s %9s %9s %9s\n", "copies of a", "us", "estimate", "GB/s");
  const auto copy = [&](const char* label, auto tag, MatrixStrides a, int64_t skipped,
                        Precision precision, int64_t k) {
    using T = decltype(tag);
    Products products{memory, kSide, kSide, k, DType::kBFloat16};
    if (sizeof(T) == 4) products.dtype = DType::kFloat32;
    const auto problem = [&](int set) {
      Matmul p = products.at(set);
      p.a = a;
      p.precision = precision;
      p.batch.operands[1].data = static_cast<char*>(p.batch.operands[1].data) + skipped;
      return p;
    };
    const GemmPack pack = pack_of(problem(0), true, false);
    products.copies = pack.bytes();
    Race race(stream);
    race.add(products.sets(), 20, [&](int set) {
      return gemm_pack<T>(problem(set), pack, products.copies_at(set), stream) == cudaSuccess;
    });
    const double time = race.run()[0];
    const double moved = double(kSide * k * int64_t(sizeof(T)) + pack.bytes());
    std::printf("%-40s %9.2f %9.2f %9.0f\n", label, time, pack_time(problem(0), pack),
                moved / time / 1e3);
  };
  copy("bfloat16, rows of 4095", BFloat16{}, {4095, 1}, 0, Precision::kIeee, 4095);
  copy("bfloat16, line-major, not aligned", BFloat16{}, {1, 4096}, 2, Precision::kIeee, kSide);
  copy("float32, line-major", float{}, {1, 4096}, 0, Precision::kTF32, kSide);
  copy("float32, K-major, split", float{}, {4096, 1}, 0, Precision::kTF32x3, kSide);
  copy("float32, line-major, split", float{}, {1, 4096}, 0, Precision::kTF32x3, kSide);

  // The inputs serve as parts: half as many sets of twice the size.
  Products products{memory, kSide, kSide, 2 * kSide, DType::kFloat32};
  const auto split = [&](int set) {
    Matmul p = products.at(set);
    p.k = kSide;
    p.precision = Precision::kTF32x3;
    return p;
  };
  const HopperConfig config =
      hopper_variant(split(0), 4, current_device(), false, kHopperSplitTile, 1);
  Race race(stream);
  race.add(products.sets(), 4, [&](int set) {
    return gemm_hopper<TF32x3, false>(split(set), config, PlainEpilogue{}, nullptr, stream) ==
           cudaSuccess;
  });
  const double time = race.run()[0];
  const double waves = double(ceil_div(config.tiles, current_device().sms));
  std::printf("3xTF32 of 4096^3 after its copies: %.1f us, %.3f us per stage, estimated %.3f\n",
              time, ((time - kHopperFixedTime) / waves - 0.5) / (kSide / 32), kHopperSplitTime);
}

}  // namespace

int main(int count, char** arguments) {
  const bool print_all = count > 1 && std::string(arguments[1]) == "all";
  cudaStream_t stream;
  Memory memory{};
  check(cudaStreamCreate(&stream), "stream");
  check(cudaMalloc(&memory.inputs, kInputs), "inputs");
  check(cudaMalloc(&memory.results, kResults), "results");
  fill_kernel<<<1024, 256, 0, stream>>>(reinterpret_cast<uint32_t*>(memory.inputs), kInputs / 4);
  check(cudaStreamSynchronize(stream), "fill");
  const Cublas cublas(stream);
  if (cublas.gemm == nullptr) std::printf("no cuBLAS found: its column stays empty\n");
  refit(race_tiles(memory, cublas, stream, print_all));
  time_copies(memory, stream);
  check(cudaDeviceSynchronize(), "the end");
}
