// The ring of csrc/scan/cuda/step_ring.cuh, filled by a warp and compared with the memory that it was filled from.
#include <sys/mman.h>

#include "emulator.h"

inline void __syncwarp() {
  const unsigned nothing = 0;
  emulator::gather(&nothing, 1);
}

inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t bits) {
  return uint32_t((uint64_t(high) << 32 | low) >> (bits & 31));
}

#include "scan/cuda/step_ring.cuh"

namespace {

using weft::scan::LinearScan;

constexpr int kStages = 4, kSteps = 7, kBatch = 2;

struct Half {
  uint16_t bits;
};

LinearScan problem;
unsigned char* shared;

template <typename T>
void compare(const T* found, const void* expected, const char* what) {
  if (std::memcmp(found, expected, sizeof(T)) != 0) emulator::fail(what);
}

template <typename T, int HP, typename Lines>
void kernel() {
  const int H = int(problem.H), lane = threadIdx.x, batch = 1;
  const int64_t line = problem.A_col == 1 ? problem.A_row : problem.A_col;
  const T zero{};
  weft::scan::StepRing<T, Lines, kStages> ring(problem, reinterpret_cast<T*>(shared), batch, 0, kSteps);
  ring.start();
  for (int step = 0; step < kSteps; ++step) {
    const auto read = ring.wait(step);
    const T* A = static_cast<const T*>(problem.A) + step * problem.A_t + batch * problem.A_b;
    const T* b = static_cast<const T*>(problem.b) + step * problem.b_t + batch * problem.b_b;
    for (int i = lane; i < HP; i += 32) {
      alignas(T) weft::scan::Line<T, HP> loaded{};
      if (i < H) read.load(i, loaded);
      for (int k = 0; k < HP; ++k) {
        if (i < H && k < H) {
          if (!read.inside(i, k)) emulator::fail("an element is not inside");
          compare(read.at(i, k), A + i * line + k, "A differs");
          compare(reinterpret_cast<const T*>(loaded) + k, A + i * line + k, "a loaded line differs");
        } else if (read.inside(i, k)) {
          compare(read.at(i, k), &zero, "the padding is not zero");
        }
      }
      i < H ? compare(read.b + i, b + i, "b differs") : compare(read.b + i, &zero, "b's padding is not zero");
    }
    ring.fetch();
  }
  weft::copy_wait<0>();
}

// Random elements that end where a page without access begins.
template <typename T>
T* guarded(int64_t count) {
  constexpr int64_t kPage = 4096;
  const int64_t bytes = count * int64_t(sizeof(T)), pages = (bytes + kPage - 1) / kPage * kPage;
  void* const start = mmap(nullptr, pages + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  auto* const end = static_cast<unsigned char*>(start) + pages;
  if (start == MAP_FAILED || mprotect(end, kPage, PROT_NONE) != 0) emulator::fail("no memory");
  for (auto* byte = end - bytes; byte < end; ++byte) *byte = static_cast<unsigned char>(1 + weft::when() % 255);
  return reinterpret_cast<T*>(end - bytes);
}

// `gap` elements lie between the lines, `tail` behind the last element of A and of b.
template <typename T, int HP, int kStride>
void run_one(int H, int gap, int tail, bool reverse, unsigned seed) {
  using Aligned = weft::scan::AlignedLines<T, HP, kStride>;
  using Apart = weft::scan::AnyLines<T, HP, false>;
  using Together = weft::scan::AnyLines<T, HP, true>;
  static_assert(Apart::kElements == Together::kElements);
  constexpr int kBytes = kStages * int(sizeof(T)) * std::max(Aligned::kElements, Apart::kElements);
  const int64_t line = H + gap, matrix = line * H, steps = kSteps * kBatch;
  problem = {};
  problem.T = kSteps, problem.B = kBatch, problem.H = H;
  problem.A_t = matrix * kBatch, problem.A_b = matrix, problem.A_row = line, problem.A_col = 1;
  problem.b_t = H * kBatch, problem.b_b = H;
  const T* A = guarded<T>(matrix * steps + tail);
  const T* b = guarded<T>(H * steps + tail);
  const int64_t last = reverse ? kSteps - 1 : 0;
  problem.A = A + last * problem.A_t, problem.b = b + last * problem.b_t;
  if (reverse) problem.A_t = -problem.A_t, problem.b_t = -problem.b_t;
  problem.dtype = sizeof(T) == 2   ? weft::scan::DType::f16
                  : sizeof(T) == 4 ? weft::scan::DType::f32
                                   : weft::scan::DType::f64;
  alignas(16) static unsigned char memory[kBytes];
  auto run_lines = [&](auto* kernel) {
    std::memset(memory, 0xcd, sizeof memory);
    shared = memory;
    weft::copies.clear();
    emulator::launch(kernel, 1, 32, 1, 0, seed);
  };
  if constexpr (HP * sizeof(T) % 16 == 0) {
    if (weft::scan::lines_are_aligned(problem)) run_lines(kernel<T, HP, Aligned>);
  }
  run_lines(kernel<T, HP, Apart>);
  run_lines(kernel<T, HP, Together>);
}

template <typename T>
void run_type(int H, int gap, int tail, bool reverse, unsigned seed) {
  // Both rings of the kernels, the one of the products and the one of the replay.
  auto both = [&]<int HP, int kProduct>() {
    constexpr int kSize = int(sizeof(T));
    run_one<T, HP, kProduct>(H, gap, tail, reverse, seed);
    run_one<T, HP, (HP * kSize / 16 | 1) * 16 / kSize>(H, gap, tail, reverse, seed);
  };
  if (H <= 8) return both.template operator()<8, 8>();
  if (H <= 16) return both.template operator()<16, 24>();
  if (H <= 20) return both.template operator()<20, 24>();
  if (H <= 24) return both.template operator()<24, 24>();
  both.template operator()<32, 40>();
}

}  // namespace

extern "C" void run(int bytes, int H, int gap, int tail, int reverse, unsigned seed) {
  weft::when.seed(seed);
  if (bytes == 2) return run_type<Half>(H, gap, tail, reverse, seed);
  if (bytes == 4) return run_type<float>(H, gap, tail, reverse, seed);
  run_type<double>(H, gap, tail, reverse, seed);
}
