// Counters on a CUDA device that a kernel finds at zero: one fill serves many launches of a stream.
#pragma once
#include <ATen/core/Tensor.h>

namespace weft::vertex {

struct Counters {
  int* first;
  at::Tensor owner;  // to be held until the kernel is launched
};

// `count` zeros for one kernel, which is the next on the current stream to use them. In a capture, whose graph is
// replayed, they are filled by the graph.
Counters zeroed_counters(int count);

}  // namespace weft::vertex
