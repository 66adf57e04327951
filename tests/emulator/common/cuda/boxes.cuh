// csrc/common/cuda/boxes.cuh for a processor.
#pragma once
#include "common/cuda/ptx.jit.cuh"

namespace weft {

// Boxes of a tensor, at any time before their barrier or their wait says so.
struct alignas(64) TensorMap {
  char* base;
  int64_t extents[3], strides[3];  // elements, bytes
  int box[2], size;

  // f(element of the tensor or null, byte of the box)
  template <typename F>
  void each(int x, int y, int z, const F& f) const {
    for (int i = 0; i < box[1]; ++i) {
      for (int j = 0; j < box[0]; ++j) {
        const int64_t at[3] = {x + j, y + i, z};
        bool exists = true;
        int64_t offset = 0;
        for (int k = 0; k < 3; ++k) {
          exists &= at[k] >= 0 && at[k] < extents[k];
          offset += at[k] * strides[k];
        }
        f(exists ? base + offset : nullptr, (i * box[0] + j) * size);
      }
    }
  }
};
inline void copy_box(u32 to, const TensorMap& map, int x, int y, int z, u32 barrier) {
  const int bytes = map.box[0] * map.box[1] * map.size;
  if (to % 128 != 0) emulator::fail("misaligned box");
  emulator::shared_at(to + bytes - 1, 1);
  unsigned char* const at = emulator::shared_at(to, 1);
  emulator::Arrivals& arrivals = emulator::arrivals_at(*emulator::current->block, barrier);
  emulator::messages.push_back([=, &map, &arrivals] {
    map.each(x, y, z, [&](const char* from, int byte) {
      from == nullptr ? std::memset(at + byte, 0, map.size) : std::memcpy(at + byte, from, map.size);
    });
    arrivals.bytes -= bytes;
    arrivals.advance();
  });
}
inline void barrier_sync(int barrier, int threads) {
  emulator::Meeting& meeting = emulator::current->block->others[barrier];
  if (meeting.arrived > 0 && meeting.expected != threads) emulator::fail("a barrier of other threads");
  meeting.expected = threads;
  emulator::meet(meeting);
}
inline void barrier_arrive(int barrier, int threads) {
  emulator::Meeting& meeting = emulator::current->block->others[barrier];
  if (meeting.arrived > 0 && meeting.expected != threads) emulator::fail("a barrier of other threads");
  meeting.expected = threads;
  emulator::arrive(meeting);
}

}  // namespace weft
