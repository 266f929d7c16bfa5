// The instructions that kernels spell in PTX, named as translate.py names them: outputs
// first, by reference, then inputs. A new one does not compile until it is written here.
#pragma once

#include "emulator.h"
#include "narrow.h"

namespace emulator {

// --- numbers --------------------------------------------------------------------

inline float from_bf16(uint16_t bits) {
  const uint32_t word = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}
inline uint16_t to_bf16(float value) {
  if (std::isnan(value)) return 0x7FFF;
  uint32_t word;
  std::memcpy(&word, &value, sizeof word);
  return uint16_t((word + 0x7FFF + (word >> 16 & 1)) >> 16);
}
// By hand: not every compiler has _Float16.
inline float from_f16(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float size = exponent == 31  ? (fraction == 0 ? INFINITY : NAN)
                     : exponent == 0 ? std::ldexp(float(fraction), -24)
                                     : std::ldexp(float(1024 + fraction), exponent - 25);
  return bits >> 15 ? -size : size;
}
inline uint16_t to_f16(float value) {
  if (std::isnan(value)) return 0x7FFF;
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const float size = std::fabs(value);
  if (size >= 65520) return sign | 0x7C00;
  const int exponent = std::max(size == 0 ? -14 : std::ilogb(size), -14);
  // A fraction that is rounded up to 2048 carries into the exponent.
  const int fraction = int(std::nearbyint(std::ldexp(size, 10 - exponent)));
  return uint16_t(sign | ((exponent + 14) * 1024 + fraction));
}

inline void ptx_cvt_rn_bf16_f32(uint16_t& to, float value) { to = to_bf16(value); }
inline void ptx_cvt_rn_bf16x2_f32(uint32_t& to, float high, float low) {
  to = uint32_t(to_bf16(high)) << 16 | to_bf16(low);
}
inline void ptx_cvt_rn_f16_f32(uint16_t& to, float value) { to = to_f16(value); }
inline void ptx_cvt_rn_f16x2_f32(uint32_t& to, float high, float low) {
  to = uint32_t(to_f16(high)) << 16 | to_f16(low);
}
inline void ptx_cvt_f32_f16(float& to, uint16_t bits) { to = from_f16(bits); }
inline void ptx_cvt_rn_satfinite_e4m3x2_f32(uint16_t& to, float high, float low) {
  using cuda_ops::Float8E4M3;
  to = uint16_t(Float8E4M3::saturated(high).bits << 8 | Float8E4M3::saturated(low).bits);
}
inline void ptx_cvt_rn_satfinite_e5m2x2_f32(uint16_t& to, float high, float low) {
  using cuda_ops::Float8E5M2;
  to = uint16_t(Float8E5M2::saturated(high).bits << 8 | Float8E5M2::saturated(low).bits);
}
inline void ptx_cvt_rna_tf32_f32(uint32_t& to, float value) {
  std::memcpy(&to, &value, sizeof to);
  if (std::isfinite(value)) to = (to + 0x1000) & ~0x1FFFu;
}
inline void ptx_rcp_approx_f32(float& to, float value) { to = 1 / value; }
inline void ptx_rcp_approx_ftz_f32(float& to, float value) { to = 1 / value; }
inline void ptx_ex2_approx_ftz_f32(float& to, float value) { to = std::exp2(value); }

// Bit a * 4 + b * 2 + c of `table` for bits a, b, c.
inline void ptx_lop3_b32(uint32_t& a, uint32_t b, uint32_t c, uint32_t table) {
  uint32_t result = 0;
  for (uint32_t i = 0; i < 8; ++i) {
    if ((table >> i & 1) == 0) continue;
    result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  }
  a = result;
}
// With the vote and the complement that follow it: lanes_with_bit().
inline void ptx_setp_ne_u32(uint32_t& lanes, uint32_t bit) {
  const uint32_t votes = ballot(bit != 0);
  lanes = bit != 0 ? votes : ~votes;
}

// With the store that never happens: wgmma_wait_after().
inline void ptx_setp_lt_f32(uint32_t, float value, float least) {
  if (value < least) fail("%g is below %g in wgmma_wait_after", double(value), double(least));
}

// --- loads and stores -----------------------------------------------------------

struct Quad {
  uint32_t w[4];
};

inline void ptx_ld_shared_b16(uint16_t& to, uint32_t at) { to = load_shared<uint16_t>(at); }
inline void ptx_ld_shared_b32(uint32_t& to, uint32_t at) { to = load_shared<uint32_t>(at); }
inline void ptx_ld_shared_f32(float& to, uint32_t at) { to = load_shared<float>(at); }
inline void ptx_ld_shared_v4_u32(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t at) {
  const Quad q = load_shared<Quad>(at);
  a = q.w[0], b = q.w[1], c = q.w[2], d = q.w[3];
}
inline void ptx_ld_shared__cluster_v4_f32(float& a, float& b, float& c, float& d, uint32_t at) {
  struct Floats {
    float f[4];
  };
  const Floats q = load_shared<Floats>(at);
  a = q.f[0], b = q.f[1], c = q.f[2], d = q.f[3];
}
inline void ptx_st_shared_v2_f32(uint32_t at, float a, float b) {
  store_shared(at, std::array<float, 2>{a, b});
}
inline void ptx_st_shared_v4_b32(uint32_t at, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  store_shared(at, Quad{{a, b, c, d}});
}

inline void ptx_ld_global_nc_L1__no_allocate_L2__128B_v4_u32(uint32_t& a, uint32_t& b, uint32_t& c,
                                                             uint32_t& d, const void* from) {
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0) fail("an unaligned global load");
  check_waited();
  check_read(from, 16);
  Quad q;
  std::memcpy(&q, from, sizeof q);
  a = q.w[0], b = q.w[1], c = q.w[2], d = q.w[3];
}
inline void ptx_ld_global_L1__no_allocate_v4_u32(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d,
                                                 const void* from) {
  ptx_ld_global_nc_L1__no_allocate_L2__128B_v4_u32(a, b, c, d, from);
}
inline void ptx_ld_global_L1__no_allocate_v2_u32(uint32_t& a, uint32_t& b, const void* from) {
  if (reinterpret_cast<uintptr_t>(from) % 8 != 0) fail("an unaligned global load");
  check_waited();
  check_read(from, 8);
  uint32_t words[2];
  std::memcpy(words, from, sizeof words);
  a = words[0], b = words[1];
}
// A thread may read so before it has waited, if the kernel before does not write there.
inline void ptx_ld_relaxed_gpu_global_L1__no_allocate_L2__128B_v4_u32(uint32_t& a, uint32_t& b,
                                                                      uint32_t& c, uint32_t& d,
                                                                      const void* from) {
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0) fail("an unaligned global load");
  check_read(from, 16);
  Quad q;
  std::memcpy(&q, from, sizeof q);
  a = q.w[0], b = q.w[1], c = q.w[2], d = q.w[3];
}
inline void ptx_ld_relaxed_gpu_global_s64(int64_t& value, const int64_t* from) { value = *from; }
inline void ptx_ld_acquire_gpu_global_u32(uint32_t& value, const uint32_t* from) { value = *from; }
inline void ptx_st_release_gpu_global_u32(uint32_t* to, uint32_t value) { *to = value; }
inline void ptx_atom_relaxed_gpu_global_inc_u32(uint32_t& before, int32_t* to, uint32_t most) {
  before = uint32_t(*to);
  *to = before >= most ? 0 : int32_t(before + 1);
}
inline void ptx_st_global_v4_u32(void* to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0) fail("an unaligned global store");
  const Quad q{{a, b, c, d}};
  std::memcpy(to, &q, sizeof q);
}

// --- 8 x 8 matrices of 16 bits ----------------------------------------------------
// Lane l gives the address of row l % 8 of matrix l / 8.

inline void ptx_ldmatrix_sync_aligned_m8n8_x4_shared_b16(uint32_t& a, uint32_t& b, uint32_t& c,
                                                         uint32_t& d, uint32_t at) {
  const Words* rows = exchange({{at}});
  const int lane = thread % 32;
  uint32_t* const to[4] = {&a, &b, &c, &d};
  for (int i = 0; i < 4; ++i) {
    *to[i] = load_shared<uint32_t>(rows[8 * i + lane / 4].w[0] + 4 * uint32_t(lane % 4));
  }
}
inline void ptx_ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(uint32_t& a, uint32_t& b,
                                                               uint32_t& c, uint32_t& d,
                                                               uint32_t at) {
  const Words* rows = exchange({{at}});
  const int lane = thread % 32;
  uint32_t* const to[4] = {&a, &b, &c, &d};
  for (int i = 0; i < 4; ++i) {
    const Words* pair = rows + 8 * i + lane % 4 * 2;
    const uint32_t column = 2 * uint32_t(lane / 4);
    *to[i] = load_shared<uint16_t>(pair[0].w[0] + column) |
             uint32_t(load_shared<uint16_t>(pair[1].w[0] + column)) << 16;
  }
}
inline void ptx_stmatrix_sync_aligned_m8n8_x4_shared_b16(uint32_t at, uint32_t a, uint32_t b,
                                                         uint32_t c, uint32_t d) {
  const Words* rows = exchange({{at}});
  const int lane = thread % 32;
  const uint32_t from[4] = {a, b, c, d};
  for (int i = 0; i < 4; ++i) {
    store_shared(rows[8 * i + lane / 4].w[0] + 4 * uint32_t(lane % 4), from[i]);
  }
}
inline void ptx_stmatrix_sync_aligned_m8n8_x4_trans_shared_b16(uint32_t at, uint32_t a, uint32_t b,
                                                               uint32_t c, uint32_t d) {
  const Words* rows = exchange({{at}});
  const int lane = thread % 32;
  const uint32_t from[4] = {a, b, c, d};
  for (int i = 0; i < 4; ++i) {
    const Words* pair = rows + 8 * i + lane % 4 * 2;
    const uint32_t column = 2 * uint32_t(lane / 4);
    store_shared(pair[0].w[0] + column, uint16_t(from[i]));
    store_shared(pair[1].w[0] + column, uint16_t(from[i] >> 16));
  }
}

// --- cp.async -------------------------------------------------------------------

template <int kBytes>
void copy_async(uint32_t to, const void* from, int bytes) {
  shared_of(to, kBytes, kBytes);
  if (reinterpret_cast<uintptr_t>(from) % kBytes != 0) fail("cp.async of an unaligned source");
  if (bytes < 0 || bytes > kBytes) fail("cp.async of %d of %d bytes", bytes, kBytes);
  if (bytes > 0) check_read(from, bytes);
  async().copies.add([=] {
    std::array<uint8_t, kBytes> copy{};
    std::memcpy(copy.data(), from, size_t(bytes));
    store_shared(to, copy, kBytes);
  });
}
inline void ptx_cp_async_cg_shared_global(uint32_t to, const void* from, int bytes) {
  copy_async<16>(to, from, bytes);
}
inline void ptx_cp_async_ca_shared_global(uint32_t to, const void* from, int bytes) {
  if (bytes == 8) return copy_async<8>(to, from, bytes);
  copy_async<4>(to, from, bytes);  // 4 and fewer
}
inline void ptx_cp_async_commit_group() { async().copies.commit(); }
inline void ptx_cp_async_wait_group(int pending = 0) { async().copies.wait(size_t(pending)); }

// --- the copy engine ------------------------------------------------------------

inline void ptx_prefetch_tensormap(const void*) {}
inline void ptx_cp_async_bulk_tensor_3d_shared__cluster_global_mbarrier__complete_tx__bytes(
    uint32_t to, const void* map, uint32_t barrier, int x, int y, int z) {
  tma_load(map, to, barrier, {{x, y, z, 0, 0}});
}
inline void ptx_cp_async_bulk_tensor_5d_shared__cluster_global_mbarrier__complete_tx__bytes(
    uint32_t to, const void* map, uint32_t barrier, int x, int y, int z0, int z1, int z2) {
  tma_load(map, to, barrier, {{x, y, z0, z1, z2}});
}
inline void
ptx_cp_async_bulk_tensor_3d_shared__cluster_global_mbarrier__complete_tx__bytes_multicast__cluster(
    uint32_t to, const void* map, uint32_t barrier, int x, int y, int z, uint32_t ranks) {
  tma_load_multicast(map, to, barrier, {{x, y, z, 0, 0}}, ranks);
}
inline void ptx_cp_async_bulk_tensor_3d_global_shared__cta_bulk_group(const void* map,
                                                                      uint32_t from, int x, int y,
                                                                      int z) {
  tma_store(map, from, {{x, y, z, 0, 0}});
}
inline void ptx_cp_async_bulk_commit_group() { async().stores.commit(); }
inline void ptx_cp_async_bulk_wait_group_read(int pending) { async().stores.wait(size_t(pending)); }
inline void ptx_fence_proxy_async_shared__cta() { proxy_fence(); }

// --- barriers -------------------------------------------------------------------

inline void ptx_mbarrier_init_shared__cta_b64(uint32_t at, uint32_t arrivals) {
  barrier_init(at, arrivals);
}
inline void ptx_mbarrier_arrive_shared__cta_b64(uint32_t at) { barrier_arrive(at, 0); }
inline void ptx_mbarrier_arrive_shared__cluster_b64(uint32_t at) { barrier_arrive(at, 0); }
inline void ptx_mbarrier_arrive_expect_tx_shared__cta_b64(uint32_t at, uint32_t bytes) {
  barrier_arrive(at, bytes);
}
inline void ptx_mbarrier_try_wait_parity_shared__cta_b64(uint32_t at, uint32_t phase) {
  barrier_wait(at, phase);
}
inline void ptx_bar_sync(uint32_t name, uint32_t threads) { block_barrier(name, threads); }

// Every store is seen at once here, and there are no registers to hand over.
inline void ptx_fence_mbarrier_init_release_cluster() {}
template <class... Operands>
void ptx_setmaxnreg_dec_sync_aligned_u32(Operands...) {}
template <class... Operands>
void ptx_setmaxnreg_inc_sync_aligned_u32(Operands...) {}

// --- launches -------------------------------------------------------------------

template <class... Addresses>
void ptx_griddepcontrol_wait(Addresses...) {
  wait_for_kernels_before();
}
// A permission that is not used: kernels run one after the other.
inline void ptx_griddepcontrol_launch_dependents() {}

// --- clusters -------------------------------------------------------------------

inline void ptx_mov_u32_cluster_ctarank(uint32_t& to) { to = block->rank; }
inline void ptx_mov_u32_clusterid(uint32_t& to) { to = block->index / cluster_blocks(); }
inline void ptx_mov_u32_nclusterid(uint32_t& to) { to = grid_blocks / cluster_blocks(); }
inline void ptx_mapa_shared__cluster_u32(uint32_t& to, uint32_t at, uint32_t rank) {
  to = cluster_address(at, rank);
}
// Between pointers: what is stored through the result is not checked for its bounds.
template <class T>
void ptx_mapa_u64(T*& to, T* pointer, uint32_t rank) {
  to = reinterpret_cast<T*>(
      shared_of(cluster_address(emulator::shared_address(pointer), rank), 1, 1));
}
// Both halves of it: the wait follows at once in the same asm. Every store is seen at once here.
inline void ptx_barrier_cluster_arrive_release() { cluster_barrier(); }
inline void ptx_barrier_cluster_arrive_relaxed() { cluster_barrier(); }
inline void ptx_fence_acq_rel_cta() {}

// --- wgmma's order --------------------------------------------------------------
// Warp-wide, as .sync says; the products are in tensor_cores.h.

inline void ptx_wgmma_fence_sync_aligned() { exchange({}); }
inline void ptx_wgmma_commit_group_sync_aligned() {
  exchange({});
  async().products.commit();
}
inline void ptx_wgmma_wait_group_sync_aligned(int pending) {
  exchange({});
  async().products.wait(size_t(pending));
  exchange({});
}

}  // namespace emulator
