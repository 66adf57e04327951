#include "vertex/graph/schedule.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "vertex/graph/planner.h"

namespace weft::vertex {

namespace {

constexpr int32_t kScheduleMagic = 0x57530003;  // "WS", version 3

}  // namespace

int64_t Schedule::size(Array which) const {
  const int64_t V = number(kVertices), T = number(kTasks), C = number(kColumns), E = number(kEdges), U = number(kUses);
  switch (which) {
    case kTaskTable:
      return T * static_cast<int64_t>(sizeof(Task) / sizeof(int32_t));
    case kFrontierTask:
      return number(kFrontiers) + 1;
    case kSlots:
      return C;
    case kVertexOf:
      return V;
    case kGather:
      return C * V;
    case kRuns:
      return T * C;
    case kFirstUse:
      return V + 1;
    case kFirstEdge:
    case kFirstSumUse:
      return number(kSums) ? V + 1 : 0;
    case kEdgeChild:
    case kEdgeParent:
    case kSumUseEdge:
      return E;
    case kUsers:
      return 2 * U;
    case kKindStart:
      return number(kKinds) > 1 ? number(kKinds) + 1 : 0;
    case kKindVertex:
      return number(kKinds) > 1 ? V : 0;
    case kNumArrays:
      break;
  }
  return 0;
}

void Schedule::make_block(const int32_t (&header)[kHeader]) {
  // size() reads the numbers.
  block_ = std::make_unique<int32_t[]>(kHeader);
  std::copy(header, header + kHeader, block_.get());
  int64_t offsets[kNumArrays + 1];
  int64_t end = static_cast<int>(kHeader) + kNumArrays + 1;
  for (int which = 0; which < kNumArrays; ++which) {
    end = (end + 3) / 4 * 4;
    offsets[which] = end;
    end += size(static_cast<Array>(which));
  }
  offsets[kNumArrays] = end;
  if (end > std::numeric_limits<int32_t>::max()) {
    throw std::length_error("weft.vertex: the schedule of this batch needs more than 2147483647 integers");
  }
  auto block = std::make_unique_for_overwrite<int32_t[]>(end);
  std::copy(header, header + kHeader, block.get());
  block[kMagic] = kScheduleMagic;
  std::copy(offsets, offsets + kNumArrays + 1, block.get() + kHeader);
  // Nor is what lies between arrays left to chance.
  int64_t written = static_cast<int>(kHeader) + kNumArrays + 1;
  for (int which = 0; which < kNumArrays; ++which) {
    std::fill(block.get() + written, block.get() + offsets[which], 0);
    written = offsets[which] + size(static_cast<Array>(which));
  }
  block_ = std::move(block);
  length_ = static_cast<size_t>(end);
}

Schedule::Schedule(const Graphs& graphs, std::span<const Kind> kinds, std::span<const int32_t> kind_of_type,
                   int32_t groups) {
  const Problem problem{graphs, kinds, kind_of_type, groups};
  if (TreePlanner::can(problem)) {
    TreePlanner(*this, problem).plan();
  } else {
    DagPlanner(*this, problem).plan();
  }
}

std::pair<int64_t, int64_t> first_beyond(const Graphs& graphs, std::span<const int64_t> limits) {
  if (limits.empty() || graphs.num_slots() <= *std::min_element(limits.begin(), limits.end())) return {-1, -1};
  const auto first_edge = graphs.first_edge(), slot = graphs.slot(), types = graphs.types();
  for (int64_t v = 0; v < graphs.num_vertices(); ++v) {
    if (first_edge[v] == first_edge[v + 1]) continue;
    const int64_t highest = slot[first_edge[v + 1] - 1];
    if (highest >= limits[limits.size() == 1 ? 0 : types[v]]) return {v, highest};
  }
  return {-1, -1};
}

}  // namespace weft::vertex
