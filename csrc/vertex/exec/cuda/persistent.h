// The persistent kernel of one pass of a program on the current device: compile, launch. No torch header.
#pragma once
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

#include "jit/jit.h"
#include "vertex/exec/cuda/persistent.jit.cuh"
#include "vertex/exec/executor.h"
#include "vertex/exec/persistent_source.h"

namespace weft::vertex {

struct PersistentKernel {
  jit::Kernel* kernel;
  int blocks;  // of a group
  unsigned shared_bytes;
  mutable std::atomic<int> most_groups;  // that are resident at once; fewer when a launch was refused
};

// What is compiled for a pass.
jit::Request persistent_request(const Program& program, Pass pass, int32_t most_blocks, bool tf32, int32_t matrices,
                                int32_t vectors = 0, const LossForm& form = {});

// Compiled at first use; lives as long as the program. `tf32`: as torch multiplies float32. Of a program that has no
// obstacle (persistent_obstacle) on this device.
const PersistentKernel& persistent_kernel(const Program& program, Pass pass, int32_t most_blocks, bool tf32,
                                          int32_t matrices, int32_t vectors = 0, const LossForm& form = {});

// Counters that a launch finds at 0.
inline int counters_of(const Memory& memory) {
  return (1 + memory.groups) * kCounterApart;
}

// Runs all of the pass, of a training step with these, as many updates as it was compiled for. False where the blocks
// are not resident after all.
bool launch_persistent(const PersistentKernel& kernel, const Memory& memory, Pass pass, unsigned* arrived,
                       cudaStream_t stream, const TrainingArguments* training = nullptr,
                       const UpdateArgument* updates = nullptr);

// How many launches were refused in this process.
int64_t refused_launches();

// The arrays of a schedule as kernels take them.
FrontierArguments arguments_of(const Arrays& arrays);

}  // namespace weft::vertex
