// Pinned host memory. Every device and kernel can use it by its host address.
#pragma once
#include <cstdint>

namespace weft::offload {

// Pinned memory may end at every multiple of this address and go on behind it as other memory: a copy of the driver's
// must not cross one. Kernels may.
constexpr int64_t kPinnedPiece = 32 << 20;

// Null where the system refuses. Neither function disturbs a stream capture in progress. The driver makes other threads
// wait while it pins; `patiently`: rests after each piece, so that they wait for a quarter of the time at most.
void* allocate_pinned(int64_t bytes, bool patiently = false);
void free_pinned(void* data);

}  // namespace weft::offload
