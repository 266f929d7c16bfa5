// The bulk tensor copies, and what the runtime is asked for on their way.
#include "emulator.h"

namespace emulator {
namespace {

constexpr int kRow = 128;  // bytes of a box's row: the swizzle's

// What is kept in the 128 bytes of a CUtensorMap.
struct Map {
  uint8_t* data;
  int64_t strides[4];  // bytes, from y on
  uint32_t most[5];    // the last place of each dim
  int rows;            // of a box
  uint8_t element;     // bytes
  bool rounds;         // to tf32
};
static_assert(sizeof(Map) <= sizeof(CUtensorMap), "a map has 128 bytes");

Map map_at(const void* map) {
  Map copy;
  std::memcpy(&copy, map, sizeof copy);
  return copy;
}

// The hardware swizzles by bits of the address, so boxes start at multiples of 1024.
uint32_t chunk_address(uint32_t box, int row, int chunk) {
  const uint32_t address = box + uint32_t(row * kRow + chunk * 16);
  return address ^ ((address >> 7 & 7) << 4);
}

// Calls body(address in shared memory, place in global memory) of each element's; a place of
// null is outside of the tensor.
template <class Body>
void each_element(const Map& m, uint32_t box, const Coordinates& at, const Body& body) {
  const int per_chunk = 16 / m.element;
  for (int row = 0; row < m.rows; ++row) {
    for (int column = 0; column < kRow / m.element; ++column) {
      Coordinates here = at;
      here[0] += column;
      here[1] += row;
      bool inside = true;
      uint8_t* place = m.data + int64_t(here[0]) * m.element;
      for (int d = 0; d < 5; ++d) {
        inside = inside && here[d] >= 0 && uint32_t(here[d]) <= m.most[d];
        if (d > 0) place += here[d] * m.strides[d - 1];
      }
      const uint32_t address =
          chunk_address(box, row, column / per_chunk) + uint32_t(column % per_chunk * m.element);
      body(address, inside ? place : nullptr);
    }
  }
}

uint32_t rounded_to_tf32(uint32_t word) { return (word + 0x1000) & ~0x1FFFu; }

CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t dims, void* data,
                const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  const bool halves =
      type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16 || type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const cuuint32_t element = halves ? 2 : 4;
  bool valid = (dims == 3 || dims == 5) && swizzle == CU_TENSOR_MAP_SWIZZLE_128B &&
               reinterpret_cast<uintptr_t>(data) % 16 == 0 && box[0] * element == kRow &&
               box[1] > 0 && box[1] <= 256;
  Map kept{static_cast<uint8_t*>(data),
           {},
           {},
           int(box[1]),
           uint8_t(element),
           type == CU_TENSOR_MAP_DATA_TYPE_TFLOAT32};
  for (cuuint32_t d = 0; d < dims && valid; ++d) {
    valid = sizes[d] > 0 && sizes[d] <= 1ull << 32 && (d < 2 || box[d] == 1);
    kept.most[d] = uint32_t(sizes[d] - 1);
    if (d == 0) continue;
    valid = valid && strides[d - 1] % 16 == 0 && strides[d - 1] < 1ull << 40;
    kept.strides[d - 1] = int64_t(strides[d - 1]);
  }
  if (!valid) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(map, &kept, sizeof kept);
  return CUDA_SUCCESS;
}

// What a load does when it happens.
void load_box(const Map& m, Block& of, uint32_t to, uint32_t barrier, const Coordinates& at) {
  Block* const interrupted = block;
  block = &of;
  each_element(m, to, at, [&](uint32_t address, const uint8_t* place) {
    uint32_t word = 0;
    if (place != nullptr) {
      check_read(place, m.element);
      std::memcpy(&word, place, size_t(m.element));
    }
    if (m.rounds) word = rounded_to_tf32(word);
    std::memcpy(shared_of(address, m.element, m.element), &word, size_t(m.element));
    mark_by_engine(address);
  });
  barrier_bytes(of, barrier, int64_t(m.rows) * kRow);
  block = interrupted;
}

}  // namespace

void tma_load(const void* map, uint32_t to, uint32_t barrier, Coordinates at) {
  tma_load_multicast(map, to, barrier, at, 1u << block->rank);
}

void tma_load_multicast(const void* map, uint32_t to, uint32_t barrier, Coordinates at,
                        uint32_t ranks) {
  check_waited();
  const Map m = map_at(map);
  if (to % 1024 != 0) fail("a box at shared address %x, no multiple of 1024", to);
  // It may be there in one block long before it is in another.
  for (uint32_t rank = 0; rank < 32; ++rank) {
    if ((ranks >> rank & 1) == 0) continue;
    later([=, of = &cluster_block(rank)] { load_box(m, *of, to, barrier, at); });
  }
}

void tma_store(const void* map, uint32_t from, Coordinates at) {
  check_waited();
  const Map m = map_at(map);
  if (from % 1024 != 0) fail("a box at shared address %x, no multiple of 1024", from);
  each_element(m, from, at, [](uint32_t address, uint8_t*) { check_visible(address); });
  async().stores.add([=] {
    each_element(m, from, at, [&](uint32_t address, uint8_t* place) {
      if (place == nullptr) return;
      std::memcpy(place, shared_of(address, m.element, m.element), size_t(m.element));
    });
  });
}

}  // namespace emulator

// --- the runtime ----------------------------------------------------------------

extern "C" {
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const bool major = attribute == cudaDevAttrComputeCapabilityMajor;
  *value = major ? emulator::capability / 10 : emulator::capability % 10;
  if (attribute == cudaDevAttrMultiProcessorCount) *value = 3;
  if (attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin) *value = 227 * 1024;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** found, unsigned,
                                             unsigned long long, cudaDriverEntryPointQueryResult*) {
  *found = reinterpret_cast<void*>(emulator::encode);
  return cudaSuccess;
}
}
