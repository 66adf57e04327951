// How the rnn engine would lay a recurrence out on a device that a test names, and what it expects of it: what
// weft._C.rnn.report says, without CUDA. The first geometry is taken for resident.
#include "common/costs.cpp"
#include "common/cuda/device_costs.h"
#include "rnn/persistent/cuda/products_us.h"
#include "rnn/persistent/cuda/recurrence.cpp"

static weft::costs::Costs the_costs;

const weft::costs::Costs& weft::device_costs(int) {
  return the_costs;
}

extern "C" void set_limits(int multiprocessors, int shared_per_block, int capability) {
  weft::the_limits = {multiprocessors, shared_per_block, capability, true};
}

extern "C" void put_cost(const char* table, const char* name, double value) {
  the_costs.tables.try_emplace(table, table).first->second.put(name, {value});
}

// Microseconds of all steps and layers, 0 where the weights do not fit.
extern "C" double expected_us(int cell, int type, int input_size, int hidden, int heads, int layers, int directions,
                              int64_t steps, int batch, bool packed, bool trains) {
  using namespace weft::rnn;
  double us = 0;
  for (const bool backward : {false, true}) {
    if (backward && !trains) break;
    const RecurrenceProblem problem{Cell(cell), RecurrenceType(type), backward, packed, hidden,
                                    heads,      directions,           batch};
    const auto found = recurrence_geometries(problem);
    if (found.empty()) return 0;
    us += found.front().step_us * double(steps) * layers;
    if (backward) continue;
    us += products_us(
        problem, {"", "", steps, batch, input_size, int64_t(hidden) * heads, layers, directions, packed, trains, heads},
        the_costs.table("products"));
  }
  return us;
}
