// Shared by the tuning programs of matrix products: random data, and graphs of calls that take
// turns.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "dtype.cuh"

namespace cuda_ops {

constexpr int kRounds = 5;

inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

// Two numbers of N(0, 1) from each index: power, and so the clock, depends on the data.
__global__ void fill_kernel(uint32_t* words, int64_t count) {
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    uint64_t x = uint64_t(i) * 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    x ^= x >> 31;
    const float radius = sqrtf(-2 * logf((float(uint32_t(x)) + 1) * 0x1p-32f));
    const float angle = float(x >> 32) * 0x1p-32f * 6.2831853f;
    words[i] = from_compute(radius * cosf(angle), radius * sinf(angle), BFloat16{});
  }
}

// --- timing ---------------------------------------------------------------------

using Call = std::function<bool(int set)>;

// Graphs that take turns; one that is far behind after the first round drops out.
class Race {
 public:
  explicit Race(cudaStream_t stream) : stream_(stream) {
    cudaEventCreate(&start_);
    cudaEventCreate(&end_);
  }
  ~Race() {
    for (const Entry& entry : entries_) cudaGraphExecDestroy(entry.graph);
    cudaEventDestroy(start_);
    cudaEventDestroy(end_);
  }

  // False if the call does not run.
  bool add(int sets, int calls, const Call& call) {
    if (!call(0) || cudaStreamSynchronize(stream_) != cudaSuccess) {
      cudaGetLastError();
      return false;
    }
    cudaGraph_t graph;
    Entry entry{};
    entry.calls = calls;
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed), "capture");
    for (int i = 0; i < calls; ++i) call(i % sets);
    check(cudaStreamEndCapture(stream_, &graph), "end of capture");
    check(cudaGraphInstantiate(&entry.graph, graph, 0), "graph");
    cudaGraphDestroy(graph);
    entries_.push_back(entry);
    return true;
  }

  // Median microseconds of a call, in the order in which they were added.
  std::vector<double> run() {
    double best = INFINITY;
    for (int round = 0; round < kRounds; ++round) {
      for (Entry& entry : entries_) {
        if (round > 0 && entry.times[0] > 3 * best) continue;
        float milliseconds = 0;
        cudaEventRecord(start_, stream_);
        cudaGraphLaunch(entry.graph, stream_);
        cudaEventRecord(end_, stream_);
        check(cudaEventSynchronize(end_), "a variant");
        cudaEventElapsedTime(&milliseconds, start_, end_);
        entry.times.push_back(milliseconds * 1e3 / entry.calls);
        best = std::min(best, entry.times.back());
      }
    }
    std::vector<double> medians;
    for (Entry& entry : entries_) {
      std::sort(entry.times.begin(), entry.times.end());
      medians.push_back(entry.times[entry.times.size() / 2]);
    }
    return medians;
  }

 private:
  struct Entry {
    cudaGraphExec_t graph;
    int calls;
    std::vector<double> times;
  };
  cudaStream_t stream_;
  cudaEvent_t start_, end_;
  std::vector<Entry> entries_;
};

// Calls of one graph: some 2 ms of them.
inline int calls_of(double microseconds) { return std::clamp(int(2000 / microseconds), 2, 40); }

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? NAN : values[values.size() / 2];
}

}  // namespace cuda_ops
