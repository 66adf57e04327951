// One weight of zeros_changed. Torch-free.
#pragma once
#include <cstdint>

namespace weft::sparse {

struct StoredZeros {
  const void* weight;
  const bool* stored;
  int64_t size;
};

}  // namespace weft::sparse
