// The tiles of csrc/scan/linear/cuda/diagonal_tiles.cuh: a scan or its gradients by blocks of any speed. The caller
// compares.
#include "emulator.h"

inline emulator::Brought brought(uint32_t x) {
  return emulator::gather(&x, 1);
}
inline unsigned __ballot_sync(unsigned, bool x) {
  const emulator::Brought all = brought(x);
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) bits |= all[i][0] << i;
  return bits;
}
inline int __ffs(int x) {
  return __builtin_ffs(x);
}
inline double __dadd_rn(double a, double b) {
  return a + b;
}
inline double __dmul_rn(double a, double b) {
  return a * b;
}
inline double __longlong_as_double(int64_t x) {
  double y;
  std::memcpy(&y, &x, 8);
  return y;
}
inline int64_t __double_as_longlong(double x) {
  int64_t y;
  std::memcpy(&y, &x, 8);
  return y;
}
inline float rsqrtf(float x) {
  return 1 / std::sqrt(x);
}
using std::isfinite;

#include "scan/linear/cuda/diagonal_tiles.cuh"

namespace {

using namespace weft::scan;

Tiles tiles;

template <typename T, bool kGradients, bool kEngine>
void kernel() {
  if constexpr (kEngine) {
    run_tiles_by_engine<T, kGradients>(tiles, emulator::current->block->shared);
  } else {
    run_tiles<T, kGradients>(tiles, emulator::current->block->shared);
  }
}

// The map of (steps, B, H), of which the first step of processing is at `first`.
template <typename T>
weft::TensorMap map_of(const void* first, int64_t stride_t, int64_t stride_b, int64_t steps) {
  constexpr int kSize = int(sizeof(T));
  const LinearScan& scan = tiles.problem.scan;
  auto* const base = static_cast<char*>(const_cast<void*>(first)) + (stride_t < 0 ? (steps - 1) * stride_t * kSize : 0);
  return {base,
          {scan.H, steps, scan.B},
          {kSize, std::abs(stride_t) * kSize, stride_b * kSize},
          {TileShape<T>::kWidth, TileShape<T>::kStrands * tiles.steps},
          kSize};
}

}  // namespace

template <int kSize>
using Real = std::conditional_t<kSize == 2, weft::BFloat16, std::conditional_t<kSize == 4, float, double>>;
template <int kSize>
using Element = std::conditional_t<COMPLEX, Complex<float>, Real<kSize>>;

extern "C" int64_t chunks_of(int64_t T, int steps) {
  const int64_t all = TileShape<Element<SIZE>>::kTileStrands * steps;
  return (T + all - 1) / all;
}

// Lays out a problem of merged rows as the launcher does, and runs it. `sums`: (chunks, B, H).
extern "C" void run(const DiagonalGradients* problem, bool gradients, int steps, bool pieces, int blocks, int favour,
                    void* sums, bool engine, unsigned seed) {
  using T = Element<SIZE>;
  using S = TileShape<T>;
  weft::when.seed(seed);
  // 0: words come as they come; 1: totals are seen long before states; 2: states alone are ever seen first.
  weft::turns_of_a_look = favour == 1 ? 20 : 1;
  weft::lost = [=](const void*, uint64_t word, size_t bytes) { return favour == 2 && bytes == 4 && word == kTotal; };
  tiles = {};
  tiles.problem = *problem;
  const LinearScan& scan = problem->scan;
  engine &= pieces && scan.A_t != 0 && S::engine_steps(steps) > 0 && scan.T > S::kTileStrands * S::engine_steps(steps);
  if (engine) steps = S::engine_steps(steps);
  tiles.slabs_per_row = (scan.H + S::kWidth - 1) / S::kWidth;
  tiles.slabs = scan.B * tiles.slabs_per_row;
  tiles.chunks = chunks_of(scan.T, steps);
  tiles.steps = steps;
  tiles.pieces = pieces;
  const int64_t all = tiles.slabs * tiles.chunks;
  std::vector<uint32_t> statuses(all);
  std::vector<uint64_t> words(all * S::kWidth * S::kWords);
  unsigned long long counter = 0;
  tiles.slots = 1;
  if (tiles.chunks > 1 || all > blocks) {
    tiles.slots = engine ? kEngineSlots<T> : kSlots;
    tiles.counter = &counter;
    tiles.status = statuses.data();
    tiles.words = words.data();
  } else {
    blocks = int(all);
  }
  tiles.sums = sums;
  void (*run)() = gradients ? kernel<T, true, false> : kernel<T, false, false>;
  if (engine) {
    run = gradients ? kernel<T, true, true> : kernel<T, false, true>;
    tiles.turned = scan.b_t < 0;
    tiles.A_skipped = scan.x0 == nullptr;
    const auto at = [](const void* p, int64_t offset) { return static_cast<const T*>(p) + offset; };
    tiles.A_map = map_of<T>(at(scan.A, tiles.A_skipped * scan.A_t), scan.A_t, scan.A_b, scan.T - tiles.A_skipped);
    tiles.b_map = map_of<T>(scan.b, scan.b_t, scan.b_b, scan.T);
    if (gradients) tiles.x_map = map_of<T>(problem->x, problem->x_t, problem->x_b, scan.T - 1);
  }
  emulator::launch(run, blocks, kTileThreads, 1, size_t(tile_shared_bytes<T>(steps, gradients, tiles.slots, engine)),
                   seed);
}
