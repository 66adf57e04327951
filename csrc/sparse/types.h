// Index types of the sparse room's kernels, chosen when they run. Torch-free.
#pragma once
#include <cstdint>

#include "common/dtype.h"

namespace weft::sparse {

// Calls f with a null pointer of the index type.
template <typename F>
void with_index(bool wide, F&& f) {
  if (wide) {
    f(static_cast<int64_t*>(nullptr));
  } else {
    f(static_cast<int32_t*>(nullptr));
  }
}

}  // namespace weft::sparse
