// What a persistent kernel (csrc/vertex/exec/cuda/persistent.jit.cu) is compiled with for one pass of a program. Free
// of torch and CUDA.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "vertex/program/partition.h"

namespace weft::vertex {

struct PersistentSource {
  std::vector<std::string> defines;  // of the kernel's macros, NAME=text
  int64_t shared_bytes;
  int64_t weight_bytes;  // of these
};

// `tf32`: products of floats are rounded as torch.backends.cuda.matmul allows.
PersistentSource persistent_source(const Program& program, bool backward, const Partition& partition, bool tf32,
                                   int32_t matrices);

// Why the program does not run so on a device whose blocks have so much shared memory; empty where it does.
std::string persistent_obstacle(const Program& program, int32_t most_blocks, int64_t shared_limit, int32_t matrices);

// What a block keeps of each matrix: its number, bytes.
struct Kept {
  int32_t matrix;
  int64_t bytes;
};
std::vector<Kept> kept_by_a_block(const Program& program, bool backward, const Partition& partition);

}  // namespace weft::vertex
