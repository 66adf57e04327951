// csrc/common/cuda/warpgroup.jit.cuh for a processor.
#pragma once
#include <array>
#include <map>

#include "common/cuda/ptx.jit.cuh"

namespace weft {

// Products of warpgroups: each thread makes its own sums, at once, or where it waits, when what it multiplies may have
// been overwritten. Until then the sums hold numbers that are none of them. What is refused: products whose sums were
// not fenced since the last wait, sums that are written before it, and factors whose 16 bytes somebody stored by
// store_shared and did not fence. What is not committed is not waited for. Other accesses to shared memory are not
// looked at.
inline u64 warpgroup_factor(u32 address, u32 inner_apart, u32 rows_apart) {
  if (address % 16 || inner_apart % 16 || rows_apart % 16) emulator::fail("a factor that is not aligned");
  return u64(address >> 4) | u64(inner_apart >> 4) << 16 | u64(rows_apart >> 4) << 32;
}
struct WarpgroupSums {
  bool fenced = false, committed = false;
  float* of = nullptr;  // what products add to that nobody has waited for
  float sums[64];
  std::vector<std::function<void()>> products;

  static constexpr float kNotThere = 1e15f;
  template <int kSums>
  void check(const float (&d)[kSums]) const {
    if (of == nullptr) return;
    if (d != of) emulator::fail("a wait for other sums");
    if (!std::all_of(d, d + kSums, [](float x) { return x == kNotThere; })) emulator::fail("sums that change unwaited");
  }
};
inline std::map<emulator::Fiber*, WarpgroupSums> warpgroup_sums;
inline void warpgroup_barrier() {
  emulator::Meeting& meeting = emulator::current->block->others[1 + emulator::current->thread.x / 128];
  meeting.expected = 128;
  emulator::meet(meeting);
}
inline void warpgroup_begin() {
  warpgroup_sums[emulator::current].fenced = true;
}
inline void warpgroup_commit() {
  warpgroup_sums[emulator::current].committed = true;
}
template <int kSums>
inline void warpgroup_wait(float (&d)[kSums]) {
  WarpgroupSums& all = warpgroup_sums[emulator::current];
  all.check(d);
  if (all.of == nullptr || !all.committed) return;
  for (const auto& product : all.products) product();
  std::copy_n(all.sums, kSums, d);
  all = {};
}
// 16 numbers of a row of a factor.
inline void warpgroup_numbers(u64 factor, int row, float (&x)[16]) {
  const u32 address = u32(factor & 0x3fff) << 4, inner = u32(factor >> 16 & 0x3fff) << 4,
            rows = u32(factor >> 32 & 0x3fff) << 4;
  for (int half = 0; half < 2; ++half) {
    const u32 place = address + half * inner + row / 8 * rows + row % 8 * 16;
    const unsigned char* const at = emulator::shared_at(place, 16);
    const emulator::Stored& stored = emulator::stored_at(place);
    if (stored.by != nullptr && stored.by->fences == stored.fences) emulator::fail("a factor that is not fenced");
    for (int e = 0; e < 8; ++e) {
      unsigned short bits;
      std::memcpy(&bits, at + 2 * e, 2);
      x[half * 8 + e] = bfloat16_to_float(bits);
    }
  }
}
// left(i, x): the numbers of row l / 4 + 8 i of lane l's warp.
template <int kSums, typename Left>
inline void warpgroup_product(float (&d)[kSums], const Left& left, u64 right, bool more) {
  WarpgroupSums& all = warpgroup_sums[emulator::current];
  if (!all.fenced) emulator::fail("a product whose sums are not fenced");
  all.check(d);
  if (all.of == nullptr) std::copy_n(d, kSums, all.sums);
  all.of = d;
  all.committed = false;
  std::fill_n(d, kSums, WarpgroupSums::kNotThere);
  const auto product = [=, &all] {
    const int lane = emulator::current->lane;
    float x[2][16], y[2][16];
    for (int i = 0; i < 2; ++i) left(i, x[i]);
    for (int n = 0; n < kSums / 4; ++n) {
      for (int i = 0; i < 2; ++i) warpgroup_numbers(right, n * 8 + lane % 4 * 2 + i, y[i]);
      for (int i = 0; i < 4; ++i) {
        float sum = more ? all.sums[4 * n + i] : 0.0f;
        for (int k = 0; k < 16; ++k) sum += x[i / 2][k] * y[i % 2][k];
        all.sums[4 * n + i] = sum;
      }
    }
  };
  if (all.products.empty() && when() % 2) return product();
  all.products.push_back(product);
}

inline void warpgroup_mma_bf16(float (&d)[64], u64 left, u64 right, bool more) {
  const int row = emulator::current->thread.x / 32 % 4 * 16 + emulator::current->lane / 4;
  warpgroup_product(
      d, [=](int i, float(&x)[16]) { warpgroup_numbers(left, row + i * 8, x); }, right, more);
}
inline void warpgroup_mma_bf16(float (&d)[32], const u32 (&left)[4], u64 right, bool more) {
  const emulator::Brought all = emulator::gather(left, 4);
  std::array<std::array<float, 16>, 2> rows;
  for (int column = 0; column < 16; ++column) {
    for (int i = 0; i < 2; ++i) {
      const u32 pair = all[emulator::current->lane / 4 * 4 + column % 8 / 2][column / 8 * 2 + i];
      rows[i][column] = bfloat16_to_float(static_cast<unsigned short>(column % 2 ? pair >> 16 : pair));
    }
  }
  warpgroup_product(
      d, [=](int i, float(&x)[16]) { std::copy(rows[i].begin(), rows[i].end(), x); }, right, more);
}

}  // namespace weft
