// Pinned host memory. Every device and kernel can use it by its host address.
#pragma once
#include <cstdint>

namespace weft::offload {

// Null where the system refuses. Neither function disturbs a stream capture in progress.
void* allocate_pinned(int64_t bytes);
void free_pinned(void* data);

}  // namespace weft::offload
