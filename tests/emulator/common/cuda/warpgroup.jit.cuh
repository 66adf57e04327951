// csrc/common/cuda/warpgroup.jit.cuh for a processor.
#pragma once
#include <map>

#include "common/cuda/ptx.jit.cuh"

namespace weft {

// Products of warpgroups: each thread makes its own sums, at once, or where it waits, when what it multiplies may have
// been overwritten. Nobody else's accesses to shared memory are looked at.
inline u64 warpgroup_factor(u32 address, u32 inner_apart, u32 rows_apart) {
  if (address % 16 || inner_apart % 16 || rows_apart % 16) emulator::fail("a factor that is not aligned");
  return u64(address >> 4) | u64(inner_apart >> 4) << 16 | u64(rows_apart >> 4) << 32;
}
inline std::map<emulator::Fiber*, std::vector<std::function<void()>>> warpgroup_products;
inline void warpgroup_begin() {}
inline void warpgroup_commit() {}
inline void warpgroup_wait(float (&)[64]) {
  for (const auto& product : warpgroup_products[emulator::current]) product();
  warpgroup_products[emulator::current].clear();
}
inline void warpgroup_mma_bf16(float (&d)[64], u64 left, u64 right, bool more) {
  const auto numbers = [](u64 factor, int row, float(&x)[16]) {
    const u32 address = u32(factor & 0x3fff) << 4, inner = u32(factor >> 16 & 0x3fff) << 4,
              rows = u32(factor >> 32 & 0x3fff) << 4;
    for (int half = 0; half < 2; ++half) {
      const unsigned char* const at = emulator::shared_at(address + half * inner + row / 8 * rows + row % 8 * 16, 16);
      for (int e = 0; e < 8; ++e) {
        unsigned short bits;
        std::memcpy(&bits, at + 2 * e, 2);
        x[half * 8 + e] = bfloat16_to_float(bits);
      }
    }
  };
  const auto product = [=, &d] {
    const int warp = emulator::current->thread.x / 32 % 4, lane = emulator::current->lane;
    float x[2][16], y[2][16];
    for (int i = 0; i < 2; ++i) numbers(left, warp * 16 + lane / 4 + i * 8, x[i]);
    for (int n = 0; n < 16; ++n) {
      for (int i = 0; i < 2; ++i) numbers(right, n * 8 + lane % 4 * 2 + i, y[i]);
      for (int i = 0; i < 4; ++i) {
        float sum = more ? d[4 * n + i] : 0.0f;
        for (int k = 0; k < 16; ++k) sum += x[i / 2][k] * y[i % 2][k];
        d[4 * n + i] = sum;
      }
    }
  };
  auto& waiting = warpgroup_products[emulator::current];
  if (waiting.empty() && when() % 2) return product();
  waiting.push_back(product);
}

}  // namespace weft
