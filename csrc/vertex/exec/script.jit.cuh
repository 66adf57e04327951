// The instructions of a script (csrc/vertex/exec/script.h), for the host that writes them and the kernel that runs
// them.
#pragma once

namespace weft::vertex {

constexpr int kScriptWindow = 64;  // instructions that a kernel reads at a time

// A step of the pass on rows, or edges, [first, first + count).
struct ScriptInstruction {
  enum Op : int {
    kEnd,     // of the pass
    kSignal,  // all that this block has done may be seen by its group, for the `first`-th time
    kWait,    // for the whole group's `first`-th signal
    kZero,    // the product would be zero there
    kRun,
    kRunLeaves,  // the rows are of vertices without children
  };
  int op, step, first, count;
};

}  // namespace weft::vertex
