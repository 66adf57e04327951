#include "vertex/exec/cuda/float_products.h"

#include <algorithm>
#include <cstdint>

#include "common/device.h"
#include "jit/jit.h"

namespace weft::vertex {
namespace {

constexpr const char* kSource = "vertex/exec/cuda/float_products.jit.cu";
constexpr int kUnitsAtLeast = 3;  // for each multiprocessor; of fewer the parts of tiles cost more than they save

}  // namespace

bool takes(const FloatProduct& p) {
  constexpr int kMost = 1 << 24;  // so that units, and 32 strides, are counted in 32 bits
  const auto lies_well = [](const FloatFactor& f) {
    if (f.stride > kMost) return false;
    return !f.by_inner || (reinterpret_cast<uintptr_t>(f.data) % 16 == 0 && f.stride % 4 == 0);
  };
  if (!lies_well(p.left) || !lies_well(p.right)) return false;
  if (std::max({p.rows, p.columns, p.inner}) > kMost) return false;
  const double tiles = static_cast<double>(float_tiles(p.rows)) * float_tiles(p.columns);
  const double units = tiles * float_chunks(p.inner), whole = units * kFloatTile * kFloatTile * kFloatDepth;
  const double numbers = static_cast<double>(p.rows) * p.columns * p.inner;
  return units < kMost && numbers > 0.5 * whole;
}

bool worth_float_products(const FloatProducts& all) {
  const DeviceLimits& device = device_limits();
  return device.compute_capability == 90 && all.units >= kUnitsAtLeast * device.sm_count;
}

int float_product_blocks(const FloatProducts& all) {
  return std::min(device_limits().sm_count, all.units);
}

void launch_float_products(const FloatProducts& all, cudaStream_t stream) {
  jit::Kernel& kernel = jit::kernel(kSource, {}, "vertex_float_products");
  void* arguments[] = {const_cast<FloatProducts*>(&all)};
  kernel.launch(dim3(static_cast<unsigned>(float_product_blocks(all))), dim3(kFloatThreads), kFloatShared, 0, false,
                stream, arguments);
}

}  // namespace weft::vertex
