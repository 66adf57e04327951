// The maps of chunks of csrc/scan/linear/cuda: made by warp_columns.cuh, and a vector's way through them. The caller
// compares. FEW: not every size is compiled.
#include "warp_operations.h"

#include "scan/linear/cuda/warp_columns.cuh"

namespace {

using namespace weft::scan;
using namespace weft::scan::warp;

struct Chain {
  int count, hidden;
  const float* maps;   // (count, kStride)
  float* starts;       // (count + 1, kStates)
  const float* exact;  // (count + 1, kStates): what the steps of a chunk come to
  int* redone;         // (count,)
};

LinearScan scan;
WarpPlan plan;
float* maps;
Chain chain;

float* shared() {
  return reinterpret_cast<float*>(emulator::current->block->shared);
}

template <bool kTransposed>
void columns() {
  multiply_chunks<kTransposed>(scan, plan, maps, blockIdx.x, shared());
}

bool near(float x, float y) {
  return std::abs(x - y) <= 1e-2f * (1 + std::abs(y));
}

template <typename Map, bool kSelects>
void carry() {
  const int lane = threadIdx.x, unit = std::min(lane, chain.hidden - 1);
  auto element = [&](int n, int part) { return chain.exact[n * Map::kStates + part * Map::HP + unit]; };
  float xh = element(0, 0), xc = Map::kParts == 2 ? element(0, 1) : 0.0f;
  carry_through_chunks<Map, kSelects>(chain.count, chain.maps, Map::kStride, chain.starts, Map::kStates, chain.hidden,
                                      xh, xc, shared(), [&](int n) {
                                        __syncwarp();
                                        if (!near(xh, element(n, 0)))
                                          emulator::fail("a chunk is redone from elsewhere");
                                        xh = element(n + 1, 0);
                                        if (Map::kParts == 2) xc = element(n + 1, 1);
                                        if (lane == 0) ++chain.redone[n];
                                      });
}

template <typename Map>
void launch_carry(bool selects, unsigned seed) {
  emulator::launch(selects ? carry<Map, true> : carry<Map, false>, 1, 32, 1, sizeof(float) * kBoundaryElements<Map>,
                   seed);
}

template <int kParts>
void launch_parts(int padded, bool selects, unsigned seed) {
  if (padded == 8) return launch_carry<MapLayout<kParts, 8>>(selects, seed);
  if constexpr (FEW) return launch_carry<MapLayout<kParts, 20>>(selects, seed);
  if (padded == 16) return launch_carry<MapLayout<kParts, 16>>(selects, seed);
  if (padded == 20) return launch_carry<MapLayout<kParts, 20>>(selects, seed);
  if (padded == 24) return launch_carry<MapLayout<kParts, 24>>(selects, seed);
  return launch_carry<MapLayout<kParts, 32>>(selects, seed);
}

void begin(unsigned seed) {
  weft::when.seed(seed);
}

}  // namespace

// The maps of all chunks but the last, (chunks - 1, B, floats of a map).
extern "C" void make_maps(const LinearScan* given, int64_t chunks, int64_t length, float* into, unsigned seed) {
  begin(seed);
  scan = *given, plan = {chunks, length, true}, maps = into;
  const int warps = int(((chunks - 1) * scan.B + kColumnsPairs - 1) / kColumnsPairs);
  const auto kernel = scan.A_col == 1 ? columns<false> : columns<true>;
  emulator::launch(kernel, warps, 32, 1, sizeof(float) * ColumnShape::kElements, seed);
}

extern "C" void carry_through(int parts, int padded, bool selects, const Chain* given, unsigned seed) {
  begin(seed);
  chain = *given;
  parts == 2 ? launch_parts<2>(padded, selects, seed) : launch_parts<1>(padded, selects, seed);
}
