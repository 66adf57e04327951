// The script of a persistent kernel: which of its instructions a group of blocks runs on which rows, in order. Made on
// the host from a program, its partition and the tasks of a schedule; free of torch and CUDA. Source: VPPS (MICRO
// 2018), section III.
//
// All blocks of a group run the same stream in the same order, and all groups meet equally often, so a wait can only be
// for what each block has signalled before, and none can be for ever. Groups have graphs of their own; where they meet,
// in training steps, each takes a part of the rows of steps that run once.
#pragma once
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "vertex/exec/script.jit.cuh"
#include "vertex/graph/schedule.h"
#include "vertex/program/partition.h"

namespace weft::vertex {

using Script = std::span<const ScriptInstruction>;

// For one of the groups of the tasks. `published`: products wait for values. A training step is linear layers, the
// frontiers forward, the loss, the frontiers backward, then gradients with the updates that they make.
std::vector<ScriptInstruction> script_of(const Program& program, const Partition& partition,
                                         std::span<const Task> tasks, int32_t group, bool published, bool gaps);

// Whether they can: that every slot that is gathered has a child, or a zero in its place, where that matters. `block`
// is the schedule's.
bool waits_for_values(const Partition& partition, std::span<const int32_t> block);
// Whether a slot that is gathered has no child.
bool has_gaps(std::span<const int32_t> block);

// Whether a kernel may follow a product in one instruction: they are neighbours in a script.
bool pairs(const Partition& partition, int32_t product, int32_t kernel);

// What is wrong with a script, empty where nothing is: another step or other rows than the pass has there, a wait
// without a signal before it, a step that reads what another block wrote without a wait between, no end.
std::string script_fault(const Program& program, const Partition& partition, std::span<const Task> tasks, int32_t group,
                         Script script, bool published, bool gaps);

// The scripts of some passes as they follow a schedule in its block: a header, then the instructions. So one copy takes
// them to a device.
std::vector<int32_t> scripts_block(const Program& program, std::span<const int32_t> schedule, int32_t most_blocks,
                                   std::span<const Pass> passes);

// Where they are in it.
size_t scripts_begin(std::span<const int32_t> schedule);

// Those of a block that begins with a schedule; empty of passes that it has none for.
struct Scripts {
  int32_t most_blocks = 0;  // 0: there are none
  int32_t groups = 1;
  std::array<bool, kPasses> published{};  // products wait for values
  std::array<Script, kPasses> of{};       // of all groups, one after the other, as long as the longest

  int32_t apart(size_t pass) const { return static_cast<int32_t>(of[pass].size()) / groups; }
  Script of_group(size_t pass, int32_t group) const;
};
Scripts scripts_in(std::span<const int32_t> block);

// One line per instruction.
std::string script_text(const Partition& partition, Script script);

}  // namespace weft::vertex
