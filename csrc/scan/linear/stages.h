// What the stages of a scan in chunks are expected to take, in microseconds. One chunk is a replay alone. Torch-free.
#pragma once
#include <cstdint>

namespace weft::scan {

struct Stages {
  double launches = 0, products = 0, boundaries = 0, replay = 0;
  double us() const { return launches + products + boundaries + replay; }
};

struct Expected {
  int64_t chunks;
  Stages stages;
};

}  // namespace weft::scan
