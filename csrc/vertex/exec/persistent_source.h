// What a persistent kernel (csrc/vertex/exec/cuda/persistent.jit.cu) is compiled with for a pass of a program. Free of
// torch and CUDA.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "vertex/exec/script.h"
#include "vertex/program/partition.h"

namespace weft::vertex {

// The end of a training step.
struct LossForm {
  bool cross_entropy = true;  // else mse
  bool head = false;
  int32_t classes = 0;  // of what the loss is of
};

struct PersistentSource {
  std::vector<std::string> defines;  // of the kernel's macros, NAME=text
  int64_t shared_bytes;
};

// `tf32`: products of floats are rounded as torch.backends.cuda.matmul allows. `shared_limit`: bytes of shared memory
// that a block may have. `form` is of a training step; `warpgroups`: there are products of four warps.
PersistentSource persistent_source(const Program& program, const Partition& partition, bool tf32, int64_t shared_limit,
                                   int32_t matrices, int32_t vectors, const LossForm& form = {},
                                   bool warpgroups = false);

// Why the program does not run so on a device whose blocks have so much shared memory; empty where it does.
std::string persistent_obstacle(const Program& program, int32_t most_blocks, int64_t shared_limit, int32_t matrices);
// The same of a training step.
std::string training_obstacle(const Program& program, int32_t most_blocks, int64_t shared_limit, int32_t matrices,
                              int32_t vectors, const LossForm& form);

// Of a product in the frontiers: the number of its matrix, what a block keeps of it in shared memory, and what a group
// reads of it in global memory, once a pass. Bytes.
struct Kept {
  int32_t matrix;
  int64_t kept, read;
};
std::vector<Kept> kept_by_a_block(const Program& program, const Partition& partition);

}  // namespace weft::vertex
