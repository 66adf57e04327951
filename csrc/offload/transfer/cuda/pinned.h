// Pinned host memory. Every device and kernel can use it by its host address.
#pragma once
#include <cstdint>
#include <functional>

namespace weft::offload {

// Pinned memory may end at every multiple of this address and go on behind it as other memory: a copy of the driver's
// must not cross one. Kernels may. The driver makes other threads wait while it pins: a piece takes it a few
// milliseconds.
constexpr int64_t kPinnedPiece = 8 << 20;
// Less than this is in one piece.
constexpr int64_t kPinnedWhole = 8 << 20;

// Called after each piece, with the seconds that it took; returns once the next one may follow, or false to give up.
using Rest = std::function<bool(double seconds)>;

// Null where the system refuses, or `rest` gives up; with an empty one as fast as it can. Neither function disturbs a
// stream capture in progress.
void* allocate_pinned(int64_t bytes, const Rest& rest = nullptr);
void free_pinned(void* data);

}  // namespace weft::offload
