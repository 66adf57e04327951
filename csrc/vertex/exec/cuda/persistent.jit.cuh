// What vertex/exec/cuda/persistent.jit.cu is launched with. For hosts and kernels.
#pragma once
#include "vertex/exec/cuda/frontier.jit.cuh"
#include "vertex/exec/script.jit.cuh"

namespace weft::vertex {

constexpr int kPersistentThreads = 512;

struct PersistentArguments {
  FrontierArguments frontier;
  const ScriptInstruction* script;
  unsigned* arrived;  // 0; the signals of the group
};

}  // namespace weft::vertex
