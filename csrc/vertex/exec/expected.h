// What a call is expected to take by each executor, and how persistent kernels group their blocks: by the program, the
// sizes of the graphs and a GPU's costs alone, so that the same call takes the same executor and gives the same bits.
// Microseconds. Free of torch and CUDA.
#pragma once
#include <array>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "vertex/graph/graphs.h"
#include "vertex/program/program.h"

namespace weft::vertex {

// The most rows of a task that the last kernel of the batched executor takes for the steps of a pass, as long as rows
// times `weights`, multiply-adds of the widest product for a row, stay below kTailMultiplyAdds: in one kernel small
// frontiers cost less than their launches and than products that do not fill the device.
struct TailLimit {
  int64_t rows, weights;
};
constexpr int64_t kTailMultiplyAdds = int64_t{1} << 28;
TailLimit tail_limit(const Program& program, const std::vector<Step>& steps);
inline bool in_tail(const TailLimit& limit, int64_t rows) {
  return rows <= limit.rows && rows * limit.weights <= kTailMultiplyAdds;
}

// Of the batched executor's frontiers: passes, meetings of all blocks in its last kernel, giga-multiply-adds there,
// launches (of the last kernel, too), giga-multiply-adds of products that are launched, megabytes of weights that all
// products read.
enum Batched { kCalls, kMeetings, kTail, kLaunches, kProducts, kWeights, kBatchedAmounts };
using BatchedAmounts = std::array<double, kBatchedAmounts>;
// Of functions of several types each vertex is taken for the mean of them.
BatchedAmounts batched_amounts(const Program& program, std::span<const int32_t> level_sizes, bool trains);

// How often each of the groups of a persistent kernel pays for its products in a pass: once for a frontier of at most
// kFewRows rows, else once for 8 rows.
constexpr double kFewRows = 4;
struct GroupAmounts {
  double few = 0, eights = 0;
};
GroupAmounts group_amounts(const Graphs& graphs, int32_t groups);

// Groups of blocks, and what a group takes for up to 8 rows of a frontier, forward and backward, and for a few.
struct GroupCosts {
  int32_t groups;
  double forward, backward, few_forward, few_backward;
};

// What the host spends on a call and its backward pass: all that both executors do, a launch of the frontiers, and a
// task of a persistent kernel's script.
struct HostCosts {
  double call, launch, task;
};

class Expected {
 public:
  // `level`: a frontier of a persistent kernel each way. Of the geometries, not empty, the first is taken unless
  // another gains `gain` times.
  Expected(const Program& program, std::vector<GroupCosts> geometries, double level, double gain,
           const BatchedAmounts& batched, const HostCosts& host)
      : program_(program),
        geometries_(std::move(geometries)),
        level_(level),
        gain_(gain),
        batched_(batched),
        host_(host) {}

  // The number of a geometry.
  size_t geometry(const Graphs& graphs) const;

  // The frontiers of a call by the geometry, and by the batched executor. Captured in a CUDA graph the device's time,
  // else the host's or the device's, whichever is longer.
  double persistent_us(const Graphs& graphs, size_t geometry, bool trains, bool captured) const;
  double batched_us(const Graphs& graphs, bool trains, bool captured) const;

 private:
  double device_us(const Graphs& graphs, const GroupCosts& g, bool trains) const;

  const Program& program_;  // its owner lives as long
  std::vector<GroupCosts> geometries_;
  double level_, gain_;
  BatchedAmounts batched_;
  HostCosts host_;
};

}  // namespace weft::vertex
