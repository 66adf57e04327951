// The recurrence kernel of one layer (recurrence.jit.cu) as the host sees it: geometries, launch.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "rnn/persistent/cuda/recurrence_args.h"
#include "rnn/persistent/cuda/recurrence_layout.h"

namespace weft::jit {
class Kernel;
}

namespace weft::rnn {

using RecurrenceArgs = RecurrenceArgsOf<void>;

// What the choice of a geometry depends on.
struct RecurrenceProblem {
  Cell cell;
  RecurrenceType type;
  bool backward, packed;
  int hidden, heads, directions, batch;  // hidden: of a head
  bool operator==(const RecurrenceProblem&) const = default;
};

enum class Tier { kSmall, kCluster, kGrid };
const char* tier_name(Tier tier);

// One way to lay a problem out on the device.
struct RecurrenceGeometry {
  Tier tier;
  int group, columns, units, warps, split, cluster, resident;  // as in RecurrenceShape
  bool fma;
  int directions;  // that run at the same time
  int shared_bytes;
  int64_t groups;   // of one direction, of all heads
  int64_t at_once;  // groups of one direction that a launch may have; a grid's blocks must all be resident
  double step_us;   // expected, of all sequences
};

// Geometries that fit on the current device, the fastest expected first. Empty where the weights do not fit on the
// chip.
std::vector<RecurrenceGeometry> recurrence_geometries(const RecurrenceProblem& problem);

// What the expected time of a step is the sum of: an amount of each cost, in one of `launches`.
constexpr int kRecurrenceCosts = 14;
struct RecurrenceAmounts {
  double amounts[kRecurrenceCosts];
  double launches;
};
RecurrenceAmounts geometry_amounts(const RecurrenceProblem& problem, const RecurrenceGeometry& geometry);
const char* const* recurrence_cost_names();

// What recurrence_kernel's restriction to one geometry looks like, and what compiles its kernel.
std::string geometry_text(const RecurrenceGeometry& geometry);
std::vector<std::string> geometry_defines(const RecurrenceProblem& problem, const RecurrenceGeometry& geometry);

// The geometry that runs a problem on the current device: the first of the above whose kernel is resident as computed.
// Compiles it at first use, and lives as long as the process. Nothing, and why, where there is none.
struct RecurrenceKernel {
  std::optional<RecurrenceGeometry> geometry;
  std::string why_not;
  jit::Kernel* kernel = nullptr;
};
const RecurrenceKernel& recurrence_kernel(const RecurrenceProblem& problem);

// Runs all steps; `recurrence` has a geometry, and that of args.directions directions. With Tier::kGrid the exchanged
// tensor must have been filled with ones bits.
void launch_recurrence(const RecurrenceKernel& recurrence, RecurrenceArgs args, cudaStream_t stream);

}  // namespace weft::rnn
