// Threads, shared memory and barriers of a GPU on a CPU, for device.h, ptx.h and tensor_cores.h.
// translate.py says what is emulated and what is not.
//
// A thread is a fiber. It runs until it has to wait; then another one goes on, at times one drawn
// at random. So a seed fixes the order of events.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <utility>
#include <vector>

namespace emulator {

// --- settings -----------------------------------------------------------------

// When wgmma reads its operands: at the instruction, or only where it is waited for.
enum class Timing { kEarly, kLate };
extern Timing timing;
extern int capability;  // of the device, 90 for 9.0
extern int fault;       // the number of the fault to run with, 0 for none
void seed(uint64_t value);

// Ends the process, naming block and thread.
[[noreturn, gnu::format(printf, 1, 2)]] void fail(const char* format, ...);

// --- launches -----------------------------------------------------------------

// `early`: before the kernels in front of it are done.
void run_grid(unsigned blocks, unsigned threads, unsigned shared_bytes, unsigned cluster,
              bool early, const std::function<void()>& body);
// Blocks and threads are numbered row by row, where there are several.
inline unsigned grid_width = 1, block_width = 1;
template <class Body>
void launch(dim3 blocks, dim3 threads, unsigned shared_bytes, cudaStream_t, Body body) {
  grid_width = blocks.x;
  block_width = threads.x;
  run_grid(blocks.x * blocks.y, threads.x * threads.y, shared_bytes, 1, false, body);
}
template <class... Parameters, class... Arguments>
cudaError_t launch(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                   Arguments... arguments) {
  unsigned cluster = 1;
  bool early = false;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config->attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension) cluster = attribute.val.clusterDim.x;
    // Blocks that run at the same time are emulated as a cluster.
    if (attribute.id == cudaLaunchAttributeCooperative) cluster = config->gridDim.x;
    if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization) {
      early = attribute.val.programmaticStreamSerializationAllowed != 0;
    }
  }
  grid_width = config->gridDim.x;
  block_width = config->blockDim.x;
  run_grid(config->gridDim.x, config->blockDim.x, unsigned(config->dynamicSmemBytes), cluster,
           early, [=] { kernel(arguments...); });
  return cudaSuccess;
}

// --- memory -------------------------------------------------------------------

constexpr uint32_t kMostShared = 232448;
// Dynamic shared memory starts at a multiple of 16 only: a kernel that needs 1024 has to align.
constexpr uint32_t kFirstShared = 0x410, kEndShared = 0x800 + kMostShared;

// What a mbarrier is; a phase ends when nothing is pending any more.
struct Barrier {
  uint32_t count = 0, pending = 0;
  int64_t bytes = 0;  // expected, or negative: arrived before they were
  uint64_t phase = 0;
};

// What the lanes of a warp show each other.
struct Words {
  uint32_t w[6];
};
struct Shown {
  Words words[32];
  uint32_t set = 0;  // the lanes whose first word is not 0
};
struct Warp {
  Shown shown[2];
  int arrived = 0;
  uint64_t generation = 0;
};
struct NamedBarrier {
  int arrived = 0;
  uint64_t generation = 0;
};

struct Block {
  unsigned index = 0, rank = 0;  // of the grid, of the cluster
  std::vector<uint8_t> memory = std::vector<uint8_t>(kEndShared);
  // For each 16 bytes, 1 + the thread that wrote them and has not fenced since, or 0.
  std::vector<int> written_by = std::vector<int>(kEndShared / 16 + 1);
  std::map<uint32_t, Barrier> barriers;
  NamedBarrier named[16];
  std::vector<Warp> warps;
};

extern Block* block;  // of the thread that runs
extern int thread;    // its number in the block
extern unsigned grid_blocks, block_threads;

uint8_t* dynamic_shared();
uint32_t shared_address(const void* pointer);
// An address of the cluster's block `rank`, for shared_of alone.
uint32_t cluster_address(uint32_t address, uint32_t rank);
// Memory at an address of this block or, from cluster_address, of another one.
uint8_t* shared_of(uint32_t address, int bytes, int align);

template <class T>
T load_shared(uint32_t address, int align = sizeof(T)) {
  T value;
  std::memcpy(&value, shared_of(address, sizeof(T), align), sizeof(T));
  return value;
}
template <class T>
void store_shared(uint32_t address, const T& value, int align = sizeof(T));

// What kernels may read: tensors of the problem.
void allow_reads(const void* data, size_t bytes);
void forget_reads();
void check_read(const void* from, int bytes);

// In an early launch a thread may touch global memory once it has waited. Checked of the copy
// engine's accesses, of loads of streamed matrices and of __ldg alone.
void wait_for_kernels_before();
void check_waited();

// --- proxies ------------------------------------------------------------------

// The copy engine and wgmma see ordinary writes only after a fence of the writing thread.
void mark_written(uint32_t address, int bytes);
void mark_by_engine(uint32_t address);
void proxy_fence();
void check_visible(uint32_t address);

template <class T>
void store_shared(uint32_t address, const T& value, int align) {
  std::memcpy(shared_of(address, sizeof(T), align), &value, sizeof(T));
  mark_written(address, sizeof(T));
}

// --- waiting ------------------------------------------------------------------

void later(std::function<void()> event);  // at a time of the emulator's choice

// Every lane's words; a barrier of the warp too.
const Words* exchange(const Words& mine);
// The lanes that vote for it, in the same way.
uint32_t ballot(bool mine);
template <class V>
V value_of_lane(const V& mine, int lane) {
  static_assert(sizeof(V) <= sizeof(Words), "too long to show");
  Words words{};
  std::memcpy(&words, &mine, sizeof(V));
  V value;
  std::memcpy(&value, &exchange(words)[lane], sizeof(V));
  return value;
}
void block_barrier(uint32_t name, uint32_t threads);
void cluster_barrier();
unsigned cluster_blocks();
Block& cluster_block(uint32_t rank);

void barrier_init(uint32_t address, uint32_t arrivals);
// The address is of this block or, from cluster_address, of another one.
void barrier_arrive(uint32_t address, int64_t expected_bytes);
void barrier_bytes(Block& of, uint32_t address, int64_t bytes);
void barrier_wait(uint32_t address, uint32_t parity);

// --- asynchronous work of a thread ----------------------------------------------

// Groups in the order of their commits. What is in them happens where it is waited for.
class Groups {
 public:
  void add(std::function<void()> work) { open_.push_back(std::move(work)); }
  void commit() {
    closed_.push_back(std::move(open_));
    open_.clear();
  }
  // Until all but the last `pending` groups are done.
  void wait(size_t pending) {
    while (closed_.size() > pending) {
      for (const auto& work : closed_.front()) work();
      closed_.pop_front();
    }
  }
  bool left() const {
    if (!open_.empty()) return true;
    for (const auto& group : closed_) {
      if (!group.empty()) return true;
    }
    return false;
  }

 private:
  std::vector<std::function<void()>> open_;
  std::deque<std::vector<std::function<void()>>> closed_;
};

struct Async {
  Groups copies;    // cp.async
  Groups stores;    // of the copy engine, until it has read shared memory
  Groups products;  // wgmma
};
Async& async();

// --- the copy engine ------------------------------------------------------------

// x, y and the batch's; the last ones are 0 where a map has three dims.
using Coordinates = std::array<int, 5>;
void tma_load(const void* map, uint32_t to, uint32_t barrier, Coordinates at);
// To the blocks of the cluster whose bits are set.
void tma_load_multicast(const void* map, uint32_t to, uint32_t barrier, Coordinates at,
                        uint32_t ranks);
void tma_store(const void* map, uint32_t from, Coordinates at);

}  // namespace emulator
