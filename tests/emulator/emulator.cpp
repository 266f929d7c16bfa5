#include "emulator.h"

#include <cstdarg>
#include <cstdio>
#include <memory>
#include <string>

// Saves what a call must preserve, and goes on with another fiber's stack. swapcontext
// would also enter the operating system each time, for the signal mask.
extern "C" void emulator_switch(void** save, void* to);
asm(R"(
.globl emulator_switch
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

namespace emulator {

Timing timing = Timing::kLate;
int capability = 90;
int fault = 0;
Block* block = nullptr;
int thread = -1;
unsigned grid_blocks = 0, block_threads = 0;

namespace {

constexpr size_t kStack = 96 << 10;

struct Fiber {
  void* stack_pointer = nullptr;
  std::unique_ptr<uint8_t[]> stack{new uint8_t[kStack]};
  bool waited = false;  // for the kernels before this one
  const char* waits_for = "";
  std::vector<uint32_t> unfenced;  // sixteens of shared memory that it wrote
  Async async;
};

// A thread can go on once what it watches is no longer what it saw.
struct Wait {
  const uint64_t* watched;
  uint64_t seen;
  bool over() const { return *watched != seen; }
};
constexpr uint64_t kNothing = 0;
constexpr Wait kRuns{&kNothing, 1}, kDone{&kNothing, 0};

struct Range {
  const uint8_t* data;
  size_t bytes;
};

std::vector<Fiber> fibers;  // of the blocks at work, one block's after the other's
std::vector<Wait> waits;    // of each of them
size_t running = 0;         // those that are not done
std::vector<std::unique_ptr<Block>> blocks;
const std::function<void()>* body = nullptr;
void* outside = nullptr;  // the stack of run_grid
int current = -1;
bool early_launch = false;
uint64_t random_state = 88172645463325252ull;
std::vector<std::function<void()>> events;
NamedBarrier cluster;
std::vector<Range> readable;

uint32_t draw(size_t below) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return uint32_t((random_state >> 11) % below);
}

Fiber& self() { return fibers[size_t(current)]; }

void fire_event() {
  const size_t i = draw(events.size());
  const auto event = std::move(events[i]);
  events.erase(events.begin() + std::ptrdiff_t(i));
  event();
}

void switch_to(int next) {
  void** save = current < 0 ? &outside : &self().stack_pointer;
  current = next;
  if (next < 0) return emulator_switch(save, outside);
  thread = next % int(block_threads);
  block = blocks[size_t(next) / block_threads].get();
  emulator_switch(save, self().stack_pointer);
}

[[noreturn]] void deadlock() {
  std::map<std::string, int> waiting;
  for (size_t i = 0; i < fibers.size(); ++i) {
    if (waits[i].watched != &kNothing) ++waiting[fibers[i].waits_for];
  }
  for (const auto& [what, threads] : waiting)
    std::printf("%d threads wait for %s\n", threads, what.c_str());
  for (const auto& [address, b] : block->barriers) {
    std::printf("mbarrier %x: %u of %u arrivals and %lld bytes pending, phase %u\n", address,
                b.pending, b.count, static_cast<long long>(b.bytes), unsigned(b.phase));
  }
  fail("deadlock");
}

// Goes on with a thread that can, if need be after an event.
void resume_another() {
  const int count = int(fibers.size());
  while (running > 0) {
    int next = draw(16) == 0 ? int(draw(fibers.size())) : current + 1;
    for (int i = 0; i < count; ++i, ++next) {
      if (next >= count) next -= count;
      if (!waits[size_t(next)].over()) continue;
      if (next != current) switch_to(next);
      return;
    }
    if (events.empty()) deadlock();
    fire_event();
  }
  switch_to(-1);
}

void yield() {
  if (!events.empty() && draw(16) == 0) fire_event();
  resume_another();
}

void fiber_entry() {
  (*body)();
  waits[size_t(current)] = kDone;
  --running;
  resume_another();
  std::abort();
}

void prepare(Fiber& fiber) {
  fiber.waited = !early_launch;
  fiber.waits_for = "";
  fiber.unfenced.clear();
  fiber.async = {};
  const auto end = reinterpret_cast<uintptr_t>(fiber.stack.get() + kStack) & ~uintptr_t(15);
  // As after a call: 8 bytes past a multiple of 16, the return address, six registers.
  void** top = reinterpret_cast<void**>(end - 8);
  *--top = reinterpret_cast<void*>(fiber_entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fiber.stack_pointer = top;
}

void prepare(Block& b, unsigned index, unsigned rank) {
  b.index = index;
  b.rank = rank;
  std::fill(b.memory.begin(), b.memory.end(), 0xFF);  // NaN
  std::fill(b.written_by.begin(), b.written_by.end(), 0);
  b.barriers.clear();
  for (NamedBarrier& named : b.named) named = {};
  b.warps.assign((block_threads + 31) / 32, {});
}

void check_left_behind() {
  if (!events.empty()) fail("a block ended with loads of the copy engine on their way");
  for (const auto& b : blocks) {
    for (const auto& [address, barrier] : b->barriers) {
      if (barrier.bytes != 0) fail("mbarrier %x is left with bytes pending", address);
    }
  }
  for (const Fiber& fiber : fibers) {
    if (fiber.async.copies.left()) fail("cp.async is left without a wait");
    if (fiber.async.stores.left()) fail("a block ended while the copy engine reads its memory");
    if (fiber.async.products.left()) fail("wgmma is left without a wait");
  }
}

Barrier& barrier_at(Block& of, uint32_t address) {
  const auto found = of.barriers.find(address);
  if (found == of.barriers.end()) fail("mbarrier %x is not initialized", address);
  return found->second;
}

void end_phase_if_over(Barrier& b) {
  if (b.pending == 0 && b.bytes == 0) {
    ++b.phase;
    b.pending = b.count;
  }
}

// Waits until the number is another one; `what` it is of.
void wait_for_change(const uint64_t& number, const char* what) {
  self().waits_for = what;
  waits[size_t(current)] = {&number, number};
  yield();
  waits[size_t(current)] = kRuns;
}

void arrive(NamedBarrier& b, unsigned threads, const char* what) {
  if (++b.arrived == int(threads)) {
    b.arrived = 0;
    ++b.generation;
  } else {
    wait_for_change(b.generation, what);
  }
}

}  // namespace

void seed(uint64_t value) { random_state ^= value * 0x9E3779B97F4A7C15ull; }

void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::printf("block %u thread %d: ", block == nullptr ? 0 : block->index, thread);
  std::vprintf(format, arguments);
  std::printf("\n");
  std::fflush(stdout);
  std::_Exit(1);
}

// --- launches -----------------------------------------------------------------

void run_grid(unsigned grid, unsigned threads, unsigned shared_bytes, unsigned per_cluster,
              bool early, const std::function<void()>& kernel) {
  if (shared_bytes > kMostShared) fail("%u bytes of shared memory", shared_bytes);
  if (grid == 0 || grid % per_cluster != 0) fail("%u blocks in clusters of %u", grid, per_cluster);
  grid_blocks = grid;
  block_threads = threads;
  body = &kernel;
  early_launch = early;
  fibers.resize(size_t(threads) * per_cluster);
  blocks.resize(per_cluster);
  for (unsigned first = 0; first < grid; first += per_cluster) {
    for (unsigned rank = 0; rank < per_cluster; ++rank) {
      if (!blocks[rank]) blocks[rank] = std::make_unique<Block>();
      prepare(*blocks[rank], first + rank, rank);
    }
    for (Fiber& fiber : fibers) prepare(fiber);
    waits.assign(fibers.size(), kRuns);
    running = fibers.size();
    cluster = {};
    current = -1;
    resume_another();
    check_left_behind();
  }
}

// --- memory -------------------------------------------------------------------

uint8_t* dynamic_shared() { return block->memory.data() + kFirstShared; }

uint32_t shared_address(const void* pointer) {
  return uint32_t(static_cast<const uint8_t*>(pointer) - block->memory.data());
}

Block& cluster_block(uint32_t rank) {
  if (rank >= blocks.size()) fail("there is no block %u in the cluster", rank);
  return *blocks[rank];
}

uint32_t cluster_address(uint32_t address, uint32_t rank) {
  cluster_block(rank);
  return address | (rank + 1) << 24;
}

Block& block_of(uint32_t address) {
  return address >> 24 == 0 ? *block : *blocks[(address >> 24) - 1];
}

uint8_t* shared_of(uint32_t address, int bytes, int align) {
  Block& of = block_of(address);
  const uint32_t local = address & 0xFFFFFF;
  if (local % uint32_t(align) != 0) fail("shared address %x: %d bytes unaligned", local, bytes);
  if (local < kFirstShared || local + uint32_t(bytes) > kEndShared) {
    fail("shared address %x: %d bytes out of bounds", local, bytes);
  }
  return of.memory.data() + local;
}

void allow_reads(const void* data, size_t bytes) {
  readable.push_back({static_cast<const uint8_t*>(data), bytes});
}
void forget_reads() { readable.clear(); }

void check_read(const void* from, int bytes) {
  const auto* begin = static_cast<const uint8_t*>(from);
  for (const Range& range : readable) {
    if (begin >= range.data && begin + bytes <= range.data + range.bytes) return;
  }
  fail("a global read of %d bytes outside of every tensor", bytes);
}

void wait_for_kernels_before() { self().waited = true; }

void check_waited() {
  if (!self().waited) fail("global memory before the wait for the kernels before");
}

// --- proxies ------------------------------------------------------------------

void mark_written(uint32_t address, int bytes) {
  for (uint32_t at = address / 16; at <= (address + uint32_t(bytes) - 1) / 16; ++at) {
    block->written_by[at] = thread + 1;
    self().unfenced.push_back(at);
  }
}

void mark_by_engine(uint32_t address) { block->written_by[address / 16] = 0; }

void proxy_fence() {
  for (const uint32_t at : self().unfenced) {
    if (block->written_by[at] == thread + 1) block->written_by[at] = 0;
  }
  self().unfenced.clear();
}

void check_visible(uint32_t address) {
  const int writer = block->written_by[address / 16];
  if (writer != 0) {
    fail(
        "shared address %x is read through the async proxy, and thread %d wrote it without a fence",
        address, writer - 1);
  }
}

// --- waiting ------------------------------------------------------------------

void later(std::function<void()> event) { events.push_back(std::move(event)); }

namespace {

// What the lanes of a warp have shown each other, once all of them have.
const Shown& show(const Words& mine) {
  Warp& warp = block->warps[size_t(thread) / 32];
  // Two sets: a lane may read the last ones while the others show their next.
  Shown& shown = warp.shown[warp.generation % 2];
  const int lane = thread % 32;
  if (warp.arrived == 0) shown.set = 0;
  shown.set |= uint32_t(mine.w[0] != 0) << lane;
  shown.words[lane] = mine;
  if (++warp.arrived == 32) {
    warp.arrived = 0;
    ++warp.generation;
  } else {
    wait_for_change(warp.generation, "lanes of the warp");
  }
  return shown;
}

}  // namespace

const Words* exchange(const Words& mine) { return show(mine).words; }
uint32_t ballot(bool mine) { return show({{mine}}).set; }

void block_barrier(uint32_t name, uint32_t threads) {
  if (name >= 16) fail("named barrier %u", name);
  arrive(block->named[name], threads, name == 0 ? "__syncthreads" : "a named barrier");
}

unsigned cluster_blocks() { return unsigned(blocks.size()); }
void cluster_barrier() { arrive(cluster, unsigned(fibers.size()), "the cluster"); }

void barrier_init(uint32_t address, uint32_t arrivals) {
  shared_of(address, 8, 8);
  block->barriers[address] = {arrivals, arrivals, 0, 0};
}

void barrier_arrive(uint32_t address, int64_t expected_bytes) {
  Barrier& b = barrier_at(block_of(address), address & 0xFFFFFF);
  b.bytes += expected_bytes;
  if (b.pending == 0) fail("mbarrier %x: one arrival too many", address);
  --b.pending;
  end_phase_if_over(b);
}

void barrier_bytes(Block& of, uint32_t address, int64_t bytes) {
  Barrier& b = barrier_at(of, address);
  b.bytes -= bytes;
  end_phase_if_over(b);
}

void barrier_wait(uint32_t address, uint32_t parity) {
  const Barrier& b = barrier_at(*block, address);
  if (draw(8) == 0) yield();  // a wait that holds may still be late
  while ((b.phase & 1) == (parity & 1)) wait_for_change(b.phase, "a mbarrier");
}

Async& async() { return self().async; }

}  // namespace emulator
