// The persistent kernel of one pass of a program on the current device: compile, launch. No torch header.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "vertex/exec/cuda/persistent.jit.cuh"
#include "vertex/exec/executor.h"

namespace weft::jit {
class Kernel;
}

namespace weft::vertex {

struct PersistentKernel {
  jit::Kernel* kernel;
  int blocks;
  unsigned shared_bytes;
  bool resident;  // all blocks at once
};

// Compiled at first use; lives as long as the program. `tf32`: as torch multiplies float32. Of a program that has no
// obstacle (persistent_obstacle) on this device.
const PersistentKernel& persistent_kernel(const Program& program, bool backward, int32_t most_blocks, bool tf32,
                                          int32_t matrices);

// Runs all tasks of the pass; `arrived` is 0. False where the blocks are not resident after all.
bool launch_persistent(const PersistentKernel& kernel, const Memory& memory, bool backward, unsigned* arrived,
                       cudaStream_t stream);

// The arrays of a schedule as kernels take them.
FrontierArguments arguments_of(const Arrays& arrays);

}  // namespace weft::vertex
