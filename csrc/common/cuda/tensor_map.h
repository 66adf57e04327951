// Tensors as Hopper's copy engine knows them (copy_box in boxes.cuh). Torch-free.
#pragma once
#include <cstdint>

namespace weft {

// What a map is made of. `base` and strides are multiples of 16 bytes.
struct MappedTensor {
  const void* base;
  int element_bytes;   // 2, 4 or 8
  int64_t extents[3];  // elements, neighbours first; beyond them copies read zeros
  int64_t strides[2];  // bytes, of the second and third dimension
  int box[2];          // elements of a copy along the first and second
};

// Writes 128 bytes, aligned to 64; false where the driver does not take them.
bool make_tensor_map(const MappedTensor& tensor, void* map);

}  // namespace weft
