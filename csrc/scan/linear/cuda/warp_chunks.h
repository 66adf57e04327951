// What the cost models of the chunked scans for small H share. Torch-free, for .cu files.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "common/launch.cuh"

namespace weft::scan {

// Warps that the device works on at once; the others take turns.
inline double schedulers() {
  return 4.0 * device_limits().sm_count;
}

// The time of a step of so many warps goes up in stairs: `one` where a scheduler has one of them, `each` for each of
// several, of which it holds `resident` at once.
inline double step_time(double warps, double schedulers, double one, double each, int resident) {
  const double n = std::ceil(warps / schedulers);
  if (n <= resident) return std::max(one, n * each);
  return std::ceil(n / resident) * std::max(one, resident * each);
}

// The number of chunks, at most `most`, for which time(chunks) is least, of some that grow by a quarter and of those at
// the edges of the stairs: replay has a warp per (chunk, batch), the products `warps_per_pair` for all but one chunk.
template <typename Time>
int64_t cheapest_chunks(int64_t most, int64_t batch, double schedulers, double warps_per_pair, const Time& time) {
  int64_t best = 1;
  double best_time = time(1);
  auto consider = [&](int64_t chunks) {
    if (chunks < 2 || chunks > most) return;
    const double t = time(chunks);
    if (t < best_time) best = chunks, best_time = t;
  };
  for (int64_t chunks = 2; chunks <= most; chunks += std::max<int64_t>(1, chunks / 4)) consider(chunks);
  for (int n = 1; n <= 8; ++n) {
    consider(int64_t(n * schedulers / double(batch)));
    consider(int64_t(n * schedulers / warps_per_pair / double(batch)) + 1);
  }
  return best;
}

}  // namespace weft::scan
