// The instructions of a script (csrc/vertex/exec/script.h), for the host that writes them and the kernel that runs
// them.
#pragma once

namespace weft::vertex {

constexpr int kScriptWindow = 64;  // instructions that a kernel reads at a time

// A step of the pass on rows, or edges, [first, first + count).
struct ScriptInstruction {
  enum Op : int {
    kEnd,     // of the pass
    kSignal,  // all that this block has done may be seen by its group, or where `count` by all groups, for the
              // `first`-th time
    kWait,    // for the `first`-th signal of the whole group, or of all
    kZero,    // the product would be zero there
    kRun,
    kRunLeaves,  // the rows are of vertices without children
    kPair,       // the product on these rows, and the kernel `next` on its own, whose operands are asked for before
    kBlank,      // of a kernel that gives its rows to parents: what no child gives in these rows is zero
    kOps,
    // Of a training step, once each.
    kLoss,  // of the outputs, and its gradient
    kTurn,  // where there is no room for all weights: loads those of part `first`, 1 the frontiers forward and what
            // comes after them, 2 the frontiers backward
    kUpdateHead,
  };
  int op, step, first, count;
  int next, next_first, next_count, unused;
};

// Rows of the product of a pair, and elements of a kernel that a block has in one.
constexpr int kMostPairRows = 32, kMostPairElements = 512;

}  // namespace weft::vertex
