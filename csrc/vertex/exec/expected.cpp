#include "vertex/exec/expected.h"

#include <algorithm>

namespace weft::vertex {
namespace {

bool in_frontiers(const Step& s) {
  return s.when == Step::When::kFrontiers && (s.kind == Step::Kind::kKernel || s.kind == Step::Kind::kProduct);
}

// Steps of a pass in the frontiers, and their multiply-adds for a row, of several functions' on average.
struct PassAmounts {
  double steps = 0, leaf_steps = 0, multiply_adds = 0, weight_bytes = 0;
};

PassAmounts amounts_of(const Program& program, const std::vector<Step>& steps) {
  PassAmounts found;
  const auto width = [&](int32_t b) { return static_cast<double>(program.buffers[b].width); };
  for (const Step& s : steps) {
    if (!in_frontiers(s)) continue;
    const bool product = s.kind == Step::Kind::kProduct;
    found.steps += 1;
    found.leaf_steps += product ? !s.skips_leaves || s.zeroes_leaves : s.edges || !s.leaf_code.empty();
    if (!product) continue;
    const double weights = width(s.source) * width(s.target);
    found.multiply_adds += weights;
    found.weight_bytes += weights * (is_half(program.buffers[s.source].dtype) ? 2 : 4);
  }
  const double functions = std::max(1, program.functions);
  return {found.steps / functions, found.leaf_steps / functions, found.multiply_adds / functions,
          found.weight_bytes / functions};
}

}  // namespace

TailLimit tail_limit(const Program& program, const std::vector<Step>& steps) {
  TailLimit limit{program.doubles ? 32 : 1024, 0};
  for (const Step& s : steps) {
    if (s.kind != Step::Kind::kProduct || s.when != Step::When::kFrontiers) continue;
    const int64_t inner = program.buffers[s.source].width, columns = program.buffers[s.target].width;
    limit.weights = std::max(limit.weights, inner * columns);
    if (inner % 4 != 0 || columns % 4 != 0) limit.rows = 32;
  }
  return limit;
}

BatchedAmounts batched_amounts(const Program& program, std::span<const int32_t> level_sizes, bool trains) {
  BatchedAmounts found{};
  for (const auto* steps : {&program.forward, &program.backward}) {
    if (steps == &program.backward && !trains) break;
    const PassAmounts pass = amounts_of(program, *steps);
    const TailLimit limit = tail_limit(program, *steps);
    size_t first = level_sizes.size();  // of the tail
    while (first > 1 && in_tail(limit, level_sizes[first - 1])) --first;
    if (first + 2 >= level_sizes.size()) first = level_sizes.size();
    for (size_t level = 0; level < level_sizes.size(); ++level) {
      const double work = level > 0 ? 1e-9 * level_sizes[level] * pass.multiply_adds : 0;
      const bool tail = level >= first;
      found[tail ? kTail : kProducts] += work;
      found[tail ? kMeetings : kLaunches] += level > 0 ? pass.steps : pass.leaf_steps;
      found[kWeights] += level > 0 ? 1e-6 * pass.weight_bytes : 0;
    }
    found[kLaunches] += first < level_sizes.size();
    found[kCalls] += 1;
  }
  return found;
}

GroupAmounts group_amounts(const Graphs& graphs, int32_t groups) {
  // A few graphs do not fill the groups evenly.
  const auto count = static_cast<double>(graphs.num_graphs());
  const double filled = count >= 4 * groups ? groups : 0.4 + 0.6 * std::min<double>(groups, count);
  GroupAmounts found;
  const std::span<const int32_t> sizes = graphs.level_sizes();
  for (size_t level = 1; level < sizes.size(); ++level) {
    const double rows = sizes[level] / filled;
    if (rows <= kFewRows) {
      found.few += 1;
    } else {
      found.eights += std::max(1.0, 0.5 + rows / 8);
    }
  }
  return found;
}

double Expected::device_us(const Graphs& graphs, const GroupCosts& g, bool trains) const {
  const GroupAmounts amounts = group_amounts(graphs, g.groups);
  const double eight = g.forward + (trains ? g.backward : 0), few = g.few_forward + (trains ? g.few_backward : 0);
  return static_cast<double>(graphs.num_levels()) * (trains ? 2 : 1) * level_ + amounts.few * few +
         amounts.eights * eight;
}

size_t Expected::geometry(const Graphs& graphs) const {
  size_t best = 0;
  double least = device_us(graphs, geometries_[0], true);
  const double first = least;
  for (size_t i = 1; i < geometries_.size(); ++i) {
    const double us = device_us(graphs, geometries_[i], true);
    if (us < least) best = i, least = us;
  }
  return least * gain_ < first ? best : 0;
}

double Expected::persistent_us(const Graphs& graphs, size_t geometry, bool trains, bool captured) const {
  const GroupCosts& g = geometries_.at(geometry);
  const double device = device_us(graphs, g, trains);
  if (captured) return device;
  const double passes = trains ? 2 : 1;
  const double groups = std::min<double>(g.groups, static_cast<double>(graphs.num_graphs()));
  const double tasks = passes * groups * static_cast<double>(graphs.num_levels());
  // A pass fills what is waited for, and launches.
  return std::max(device, host_.call + 2 * passes * host_.launch + tasks * host_.task);
}

double Expected::batched_us(const Graphs& graphs, bool trains, bool captured) const {
  const BatchedAmounts amounts = batched_amounts(program_, graphs.level_sizes(), trains);
  double device = 0;
  for (size_t i = 0; i < kBatchedAmounts; ++i) device += amounts[i] * batched_[i];
  if (captured) return device;
  return std::max(device, host_.call + amounts[kLaunches] * host_.launch);
}

}  // namespace weft::vertex
