#include "common/costs.h"

#include <cmath>
#include <mutex>
#include <stdexcept>
#include <tuple>
#include <utility>

namespace weft::costs {
namespace {

struct Added {
  Gpu gpu;
  Measured tables;
};

std::mutex mutex;
std::vector<Added>& added() {
  static std::vector<Added> all;
  return all;
}

// The least is the nearest.
std::tuple<int, int, int> distance(const Gpu& a, const Gpu& b) {
  return {std::abs(a.capability / 10 - b.capability / 10), std::abs(a.capability - b.capability),
          std::abs(a.multiprocessors - b.multiprocessors)};
}

double ratio(double measured, double here) {
  return measured > 0 && here > 0 ? measured / here : 1;
}

// How many times longer it takes here than where it was measured.
double factor(const std::string& kind, const Gpu& measured, const Gpu& here) {
  if (kind == "fixed") return 1;
  if (kind == "memory") return ratio(measured.bandwidth_gbs, here.bandwidth_gbs);
  const double clock = ratio(measured.clock_mhz, here.clock_mhz);
  if (kind == "clock") return clock;
  if (kind == "chip") return clock * ratio(measured.multiprocessors, here.multiprocessors);
  throw std::invalid_argument("weft: costs go with clock, chip, memory or are fixed, got '" + kind + "'");
}

}  // namespace

const std::vector<double>& Table::numbers(std::string_view name) const {
  const auto found = numbers_.find(name);
  if (found == numbers_.end() || found->second.empty()) {
    throw std::out_of_range("weft: the costs have no " + name_ + " " + std::string(name));
  }
  return found->second;
}

const Table& Costs::table(std::string_view name) const {
  const auto found = tables.find(name);
  if (found == tables.end()) throw std::out_of_range("weft: the costs have no table " + std::string(name));
  return found->second;
}

void add(const Gpu& gpu, const Measured& tables) {
  for (const auto& [name, kinds] : tables) {
    for (const auto& [kind, numbers] : kinds) factor(kind, gpu, gpu);
  }
  const std::lock_guard lock(mutex);
  for (Added& each : added()) {
    if (each.gpu.name == gpu.name) {
      each = {gpu, tables};
      return;
    }
  }
  added().push_back({gpu, tables});
}

Costs of(const Gpu& gpu) {
  const std::lock_guard lock(mutex);
  if (added().empty()) throw std::out_of_range("weft: no costs of a GPU were read; import weft");
  const Added* nearest = &added().front();
  bool same = gpu.name.empty();
  for (const Added& each : added()) {
    if (same) break;
    same = each.gpu.name == gpu.name && each.gpu.multiprocessors == gpu.multiprocessors;
    if (same || distance(each.gpu, gpu) < distance(nearest->gpu, gpu)) nearest = &each;
  }
  Costs result{nearest->gpu, !same, {}};
  for (const auto& [name, kinds] : nearest->tables) {
    Table table(name);
    for (const auto& [kind, all] : kinds) {
      const double times = same ? 1 : factor(kind, nearest->gpu, gpu);
      for (const auto& [number, values] : all) {
        std::vector<double> scaled = values;
        for (double& value : scaled) value *= times;
        table.put(number, std::move(scaled));
      }
    }
    result.tables.emplace(name, std::move(table));
  }
  return result;
}

}  // namespace weft::costs
