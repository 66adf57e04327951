// Pinned host memory, which every device and kernel may use by its host address.
#pragma once
#include <cstdint>

namespace weft::offload {

// Null where the system refuses it. Both are harmless to a stream capture that is under way.
void* allocate_pinned(int64_t bytes);
void free_pinned(void* data);

}  // namespace weft::offload
