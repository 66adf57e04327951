// What a cooperative launch throws where its blocks cannot all be on the device at once.
#pragma once
#include <stdexcept>

namespace weft::jit {

struct TooManyBlocks : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace weft::jit
