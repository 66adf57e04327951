// Geometries of the recurrence kernel: which fit, what a step of each is expected to cost, and the launch.
//
// WEFT_RNN_GEOMETRY="tier=grid group=16 columns=2 warps=8 split=8 product=mma directions=1 cluster=2" restricts the
// choice, for tests and measurements: tier is small, cluster or grid, product mma or fma, directions how many run at
// the same time, cluster how many blocks of a grid pool their rows; a missing field is free.
#include "rnn/persistent/cuda/recurrence.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <tuple>
#include <unordered_map>

#include "common/cuda/device_costs.h"
#include "common/device.h"
#include "jit/jit.h"

namespace weft::rnn {
namespace {

constexpr const char* kSource = "rnn/persistent/cuda/recurrence.jit.cu";

RecurrenceShape shape_of(const RecurrenceProblem& p, const RecurrenceGeometry& g) {
  return {.cell = p.cell,
          .type = g.fma ? RecurrenceType::kFloat : p.type,  // one kernel for both precisions
          .backward = p.backward,
          .hidden = p.hidden,
          .group = g.group,
          .columns = g.columns,
          .units = g.units,
          .warps = g.warps,
          .split = g.split,
          .cluster = g.cluster,
          .resident = g.resident,
          .fma = g.fma,
          .through_l2 = g.tier == Tier::kGrid};
}

// Registers of a thread besides resident weights: estimated, with room for the compiler.
int other_registers(const RecurrenceShape& s, const RecurrenceLayout& l) {
  int count = 64 + l.row_tiles * l.vectors * l.sums * 4 + l.pairs * (s.backward ? 22 : 18);
  if (states_of(s.cell) > 2) count += l.pairs * (s.backward ? 16 : 8);
  if (s.through_l2) count += 32 + l.blocks + 4 * l.vectors;
  if (s.type == RecurrenceType::kFloat && !s.fma) count += 16;
  return count;
}

// What a step costs, in microseconds, and of how much. `python -m benchmarks.geometries` measures geometries, where
// sequences are so long that what is exchanged does not stay in the L2 cache; the constants are fitted to them.
constexpr const char* kCostNames[kRecurrenceCosts] = {
    "base",     "gate",   "pair",      // a step; a gate block; a further pair of a thread
    "product",  "exact",  "fma",       // a thousand mma, exact ones, FMA of a scheduler
    "weights",  "vector", "partials",  // a thousand cycles of shared memory
    "kilobyte",                        // of the vector, exchanged in a cluster
    "megabyte",                        // of all vectors, read through L2 by all blocks
    "doubling",                        // of a group's blocks or sequences
    "pooled",                          // a thousand cycles for the sums a cluster exchanges
    "batch",                           // of loads with FMA in a grid, after the first
};
// By tier and pass.
struct StepCosts {
  double costs[3][2][kRecurrenceCosts];

  explicit StepCosts(const costs::Costs& all) {
    for (const Tier tier : {Tier::kSmall, Tier::kCluster, Tier::kGrid}) {
      for (const bool backward : {false, true}) {
        const auto& table =
            all.table(std::string("rnn.recurrence.") + tier_name(tier) + (backward ? ".backward" : ".forward"));
        for (int i = 0; i < kRecurrenceCosts; ++i) costs[int(tier)][backward][i] = table(kCostNames[i]);
      }
    }
  }
};
constexpr int kMaxFmaColumns = 4;

// Of one launch and step, and how many launches there are.
RecurrenceAmounts amounts_of(const RecurrenceProblem& p, const RecurrenceGeometry& g, const RecurrenceLayout& l) {
  const int bytes = element_bytes(p.type);
  const int64_t waves = ceil_div(g.groups, std::max<int64_t>(1, g.at_once));
  const bool grid = g.tier == Tier::kGrid, exact = p.type == RecurrenceType::kFloat;
  const double tiles = double(l.blocks) * l.row_tiles * l.vectors * ceil_div(g.warps, 4) / 1000;
  const double vector = double(l.vector) * g.columns * bytes / 1024, cycle = 1 / 128e3;
  const double launches = double(waves) * (p.directions / g.directions);
  return {
      {1, double(gate_blocks(p.cell)), double(l.pairs - 1), g.fma || exact ? 0 : 2 * tiles,
       !g.fma && exact ? 2 * tiles : 0, g.fma ? 8 * tiles : 0,
       cycle * g.warps * (l.blocks - l.in_registers) * l.row_tiles * 1024, cycle * g.warps * l.blocks * 64 * g.columns,
       cycle * 2 * g.split * l.rows * g.columns * 4, vector,
       vector / 1024 * g.group * double(g.groups) / double(waves) / g.cluster, std::log2(double(g.group) * g.columns),
       g.cluster > 1 ? cycle * 2 * g.cluster * l.rows_of_unit * g.units * g.columns * 4 : 0,
       g.fma && grid ? double(ceil_div(l.blocks, l.batch) - 1) : 0},
      launches};
}

double step_us(const RecurrenceProblem& p, const RecurrenceGeometry& g, const RecurrenceLayout& layout) {
  const RecurrenceAmounts a = amounts_of(p, g, layout);
  return a.launches * std::inner_product(a.amounts, a.amounts + kRecurrenceCosts,
                                         costs_here<StepCosts>().costs[int(g.tier)][p.backward], 0.0);
}

struct Restriction {
  int id = 0;  // 0 where nothing is restricted
  std::string tier, product;
  std::array<int, 6> numbers{};  // group, columns, warps, split, directions, cluster; 0 for any
};
constexpr std::array<std::string_view, 6> kNumbers = {"group", "columns", "warps", "split", "directions", "cluster"};

Restriction parse_restriction(const std::string& text) {
  const auto refuse = [&](const std::string& field) {
    throw std::runtime_error("weft: WEFT_RNN_GEOMETRY: '" + field +
                             "' is none of tier=small, cluster or grid, product=mma or fma, and group, columns, warps, "
                             "split, directions and cluster with a positive number; in '" +
                             text + "'");
  };
  Restriction r;
  std::istringstream fields(text);
  for (std::string field; fields >> field;) {
    const size_t equals = std::min(field.find('='), field.size());
    const std::string name = field.substr(0, equals), value = field.substr(std::min(equals + 1, field.size()));
    const auto number = std::find(kNumbers.begin(), kNumbers.end(), name);
    if (name == "tier" && (value == "small" || value == "cluster" || value == "grid")) {
      r.tier = value;
    } else if (name == "product" && (value == "mma" || value == "fma")) {
      r.product = value;
    } else if (number != kNumbers.end() && !value.empty() && value.size() < 6 && value[0] != '0' &&
               value.find_first_not_of("0123456789") == std::string::npos) {
      r.numbers[number - kNumbers.begin()] = std::stoi(value);
    } else {
      refuse(field);
    }
  }
  return r;
}

// Tests and measurements change the variable while a process runs: each text is parsed once.
const Restriction& restriction() {
  static const Restriction none;
  const char* const text = std::getenv("WEFT_RNN_GEOMETRY");
  if (text == nullptr || *text == 0) return none;
  static std::mutex mutex;
  static std::map<std::string, Restriction, std::less<>> known;
  const std::lock_guard lock(mutex);
  if (const auto found = known.find(std::string_view(text)); found != known.end()) return found->second;
  Restriction parsed = parse_restriction(text);
  parsed.id = int(known.size()) + 1;
  return known.emplace(text, std::move(parsed)).first->second;
}

RecurrenceKernel make_kernel(const RecurrenceProblem& p) {
  const int capability = device_limits().compute_capability;
  if (capability < 80) return {std::nullopt, "its kernels need compute capability 8.0"};
  if (const auto reason = jit::why_unavailable(capability)) return {std::nullopt, *reason};
  std::string why = "its weights do not fit on the chip";
  // Where the blocks of a group cannot be resident, those of another layout rarely can: each costs a compilation.
  std::set<std::tuple<Tier, int, int, int>> refused;
  for (RecurrenceGeometry g : recurrence_geometries(p)) {
    if (refused.contains({g.tier, g.group, g.directions, g.cluster})) continue;
    try {
      jit::Kernel& kernel = jit::kernel(kSource, geometry_defines(p, g), "recurrence");
      const dim3 threads(32 * g.warps);
      const int cluster = g.tier == Tier::kCluster ? g.group : g.cluster;
      const int resident = kernel.max_active_clusters(threads, g.shared_bytes, cluster) * cluster;
      const int needed = g.tier == Tier::kGrid ? g.group * g.directions : cluster;
      if (resident >= needed) {
        if (g.tier == Tier::kGrid) g.at_once = std::min<int64_t>(g.at_once, resident / needed);
        return {g, {}, &kernel};
      }
    } catch (const std::runtime_error& error) {
      return {std::nullopt, error.what()};  // what stops one compilation stops the others
    }
    why = "the device cannot hold its blocks at the same time";
    refused.insert({g.tier, g.group, g.directions, g.cluster});
  }
  return {std::nullopt, why};
}

struct Key {
  int device;
  RecurrenceProblem problem;
  int restriction;
  bool operator==(const Key&) const = default;
};
struct KeyHash {
  size_t operator()(const Key& k) const {
    size_t hash = 0;
    for (const int64_t part :
         {int64_t(k.device), int64_t(k.restriction), int64_t(k.problem.cell), int64_t(k.problem.type),
          int64_t(k.problem.backward), int64_t(k.problem.packed), int64_t(k.problem.hidden), int64_t(k.problem.heads),
          int64_t(k.problem.directions), int64_t(k.problem.batch)}) {
      hash = hash * 1000003 + std::hash<int64_t>()(part);
    }
    return hash;
  }
};

}  // namespace

const char* tier_name(Tier tier) {
  return tier == Tier::kSmall ? "small" : tier == Tier::kCluster ? "cluster" : "grid";
}

std::vector<std::string> geometry_defines(const RecurrenceProblem& p, const RecurrenceGeometry& g) {
  const auto define = [](const char* name, int value) { return std::string(name) + "=" + std::to_string(value); };
  const RecurrenceShape s = shape_of(p, g);
  return {define("CELL", int(s.cell)),  define("TYPE", int(s.type)),    define("BACKWARD", s.backward),
          define("HIDDEN", s.hidden),   define("HEADS", p.heads),       define("GROUP", s.group),
          define("COLUMNS", s.columns), define("UNITS", s.units),       define("WARPS", s.warps),
          define("SPLIT", s.split),     define("RESIDENT", s.resident), define("SHARED_BYTES", g.shared_bytes),
          define("CLUSTER", s.cluster), define("FMA", s.fma),           define("EXCHANGE", s.through_l2),
          define("PACKED", p.packed)};
}

RecurrenceAmounts geometry_amounts(const RecurrenceProblem& p, const RecurrenceGeometry& g) {
  return amounts_of(p, g, RecurrenceLayout(shape_of(p, g)));
}

const char* const* recurrence_cost_names() {
  return kCostNames;
}

std::string geometry_text(const RecurrenceGeometry& g) {
  std::ostringstream text;
  text << "tier=" << tier_name(g.tier) << " group=" << g.group << " columns=" << g.columns << " warps=" << g.warps
       << " split=" << g.split << " product=" << (g.fma ? "fma" : "mma") << " directions=" << g.directions
       << " cluster=" << g.cluster;
  return text.str();
}

std::vector<RecurrenceGeometry> recurrence_geometries(const RecurrenceProblem& p) {
  const DeviceLimits& device = device_limits();
  const Restriction& only = restriction();
  const int per_chunk = 16 / element_bytes(p.type);
  std::vector<RecurrenceGeometry> found;
  const auto consider = [&](RecurrenceGeometry g) {
    if (!only.tier.empty() && only.tier != tier_name(g.tier)) return;
    if (!only.product.empty() && only.product != (g.fma ? "fma" : "mma")) return;
    if (g.tier == Tier::kGrid && !device.cooperative_launch) return;
    const int numbers[] = {g.group, g.columns, g.warps, g.split, g.directions, g.cluster};
    for (int i = 0; i < 6; ++i) {
      if (only.numbers[i] != 0 && only.numbers[i] != numbers[i]) return;
    }
    g.groups = ceil_div(p.batch, g.columns) * p.heads;
    g.units = ceil_div(ceil_div(p.hidden, g.group), per_chunk) * per_chunk;
    // Clusters lie within a processing cluster of the device, whose size they do not divide: an H200 with 132
    // multiprocessors holds 66, 30, 15 and 7 clusters of 2, 4, 8 and 16 blocks.
    const int cluster = g.tier == Tier::kCluster ? g.group : g.cluster;
    const int usable = cluster <= 2   ? device.sm_count
                       : cluster < 16 ? device.sm_count * 10 / 11
                                      : device.sm_count * 8 / 9;
    g.at_once = std::max(1, usable / g.group / g.directions);
    if (g.group * (g.tier == Tier::kGrid ? g.directions : 1) > usable) return;
    // Units come in chunks of 16 bytes, so that the last blocks of a group may have none: they only wait for the
    // others.
    if (g.group > 1 && 4 * ceil_div(p.hidden, g.units) < 3 * g.group) return;
    g.resident = 0;
    const RecurrenceLayout all_shared(shape_of(p, g));
    if (all_shared.pairs > 8 || all_shared.row_tiles * all_shared.vectors > 16) return;
    const int room = std::min(248, 65536 / (32 * g.warps)) - other_registers(shape_of(p, g), all_shared);
    if (room < 0) return;
    g.resident = std::min(all_shared.blocks, room / (all_shared.row_tiles * 8));
    const RecurrenceLayout layout(shape_of(p, g));
    g.shared_bytes = layout.shared_bytes;
    if (g.shared_bytes > device.max_shared_per_block) return;
    g.step_us = step_us(p, g, layout);
    found.push_back(g);
  };
  const auto each_product = [&](RecurrenceGeometry g) {
    consider(g);
    // In TF32, mma is as fast for more sequences.
    g.fma = element_bytes(p.type) == 4 && g.columns <= kMaxFmaColumns &&
            (p.type == RecurrenceType::kFloat || p.batch <= kMaxFmaColumns);
    if (g.fma) consider(g);
  };
  const auto each_grid = [&](int group, int columns, int min_cluster = 1) {
    for (int cluster = min_cluster; cluster <= (device.compute_capability >= 90 ? 8 : 1); cluster *= 2) {
      if (group % cluster != 0) break;
      // A grid that does not hold both directions runs one after the other; blocks that need not be resident together
      // take turns by themselves.
      for (int directions = p.directions; directions >= 1; --directions) {
        each_product({.tier = Tier::kGrid,
                      .group = group,
                      .columns = columns,
                      .warps = 8,
                      .split = 8,
                      .cluster = cluster,
                      .directions = directions});
      }
    }
  };
  const auto each_columns = [&](const auto& consider_columns) {
    for (const int columns : {1, 2, 3, 4, 6, 8, 10, 12, 16, 24, 32, 48, 64}) {
      // More columns than sequences waste exchange, except that few sizes mean few compilations.
      if (columns >= 2 * p.batch && columns > 1) break;
      consider_columns(columns);
    }
  };
  // Blocks of a grid of clusters of 4 or 8, which leave some multiprocessors out.
  int in_clusters = 0;
  for (int chunks = 1; chunks <= 64; ++chunks) {
    in_clusters = ceil_div(ceil_div(p.hidden, chunks * per_chunk), 8) * 8;
    if (in_clusters <= device.sm_count * 10 / 11) break;
  }
  each_columns([&](int columns) {
    for (const int warps : {4, 8, 16}) {
      for (int split = 1; split <= warps; split *= 2) {
        RecurrenceGeometry g{.tier = Tier::kSmall,
                             .group = 1,
                             .columns = columns,
                             .warps = warps,
                             .split = split,
                             .cluster = 1,
                             .directions = p.directions};
        each_product(g);
        if (device.compute_capability < 90) continue;
        g.tier = Tier::kCluster;
        for (const int group : {2, 4, 8, 16}) {
          g.group = group;
          each_product(g);
        }
      }
    }
    for (const int group : {16, 32, 64, 128}) each_grid(group, columns);
    if (in_clusters > 64) each_grid(in_clusters, columns, 2);
  });
  if (found.empty()) {
    // Large layers of other sizes than these groups divide well.
    each_columns([&](int columns) {
      for (int chunks = 1; chunks <= 16; ++chunks) each_grid(ceil_div(p.hidden, chunks * per_chunk), columns);
    });
  }
  std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.step_us < b.step_us; });
  return found;
}

const RecurrenceKernel& recurrence_kernel(const RecurrenceProblem& problem) {
  static std::mutex mutex;
  static std::unordered_map<Key, RecurrenceKernel, KeyHash> kernels;  // nodes stay where they are
  Key key{0, problem, restriction().id};
  cuda_check(cudaGetDevice(&key.device), "cudaGetDevice");
  {
    const std::lock_guard lock(mutex);
    if (const auto found = kernels.find(key); found != kernels.end()) return found->second;
  }
  RecurrenceKernel made = make_kernel(problem);  // may compile: others need not wait
  const std::lock_guard lock(mutex);
  return kernels.try_emplace(key, std::move(made)).first->second;
}

void launch_recurrence(const RecurrenceKernel& recurrence, RecurrenceArgs args, cudaStream_t stream) {
  const RecurrenceGeometry& g = *recurrence.geometry;
  const bool grid = g.tier == Tier::kGrid;
  void* arguments[] = {&args};
  const int64_t slice = grid ? g.at_once : g.groups;  // clusters and single blocks need not be resident together
  const int directions = args.directions;
  args.directions = std::min(directions, g.directions);
  for (args.first_direction = 0; args.first_direction < directions; args.first_direction += args.directions) {
    for (int64_t first = 0; first < g.groups; first += slice) {
      args.first_sequence = int(first * g.columns);
      const int64_t blocks = g.group * std::min(slice, g.groups - first) * args.directions;
      recurrence.kernel->launch(dim3(unsigned(blocks)), dim3(32 * g.warps), g.shared_bytes,
                                g.tier == Tier::kCluster ? g.group : g.cluster, grid, stream, arguments);
    }
  }
}

}  // namespace weft::rnn
