// The ring of csrc/scan/linear/cuda/step_ring.cuh, filled by a warp and compared with the memory that it was filled
// from.
#include <sys/mman.h>

#include "emulator.h"

inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t bits) {
  return uint32_t((uint64_t(high) << 32 | low) >> (bits & 31));
}

#include "scan/linear/cuda/step_ring.cuh"

namespace {

using weft::scan::LinearScan;

constexpr int kStages = 4, kSteps = 9;

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

int64_t any_of(int64_t low, int64_t high) {
  return low + int64_t(weft::when() % uint64_t(high - low + 1));
}

// Where element 0 lies of random elements `low` to `high`, which begin behind a page without access, or end before one.
template <typename T>
T* guarded(int64_t low, int64_t high) {
  constexpr int64_t kPage = 4096;
  const int64_t bytes = (high - low + 1) * int64_t(sizeof(T)), pages = (bytes + kPage - 1) / kPage * kPage;
  void* const all = mmap(nullptr, pages + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  auto* const inner = static_cast<unsigned char*>(all) + kPage;
  if (all == MAP_FAILED || mprotect(inner, pages, PROT_READ | PROT_WRITE) != 0) emulator::fail("no memory");
  for (auto* byte = inner; byte < inner + pages; ++byte) *byte = static_cast<unsigned char>(1 + weft::when() % 255);
  return reinterpret_cast<T*>(any_of(0, 1) ? inner : inner + pages - bytes) - low;
}

// `count` positions that lie `stride` apart.
struct Range {
  int64_t low = 0, high = 0;
  void add(int64_t stride, int64_t count) { (stride < 0 ? low : high) += stride * (count - 1); }
};

template <typename T, int HP, int kStride>
void run_one(int H, unsigned seed) {
  using Aligned = weft::scan::AlignedLines<T, HP, kStride>;
  using Apart = weft::scan::AnyLines<T, HP, false>;
  using Together = weft::scan::AnyLines<T, HP, true>;
  static_assert(Apart::kElements == Together::kElements);
  constexpr int kBytes = kStages * int(sizeof(T)) * std::max(Aligned::kElements, Apart::kElements);
  // One of the strides and pointers in a case that is aligned but for it, or any of them.
  enum { kA, kb, kAt, kAb, kbt, kbb, kLine, kOdd = kLine + 3 };
  const int64_t piece = 16 / int64_t(sizeof(T)), odd = any_of(0, kOdd);
  auto stride = [&](int which, int64_t low, int64_t high) {
    const int64_t any = any_of(low, high);
    return odd > kLine || odd == which ? any : any / piece * piece;
  };
  problem = {};
  problem.T = kSteps, problem.B = 2, problem.H = H;
  problem.dtype = sizeof(T) == 2 ? weft::DType::f16 : sizeof(T) == 4 ? weft::DType::f32 : weft::DType::f64;
  const int64_t line = any_of(0, 2) ? H : stride(kLine, -3 * H, 3 * H);
  const bool rows = any_of(0, 1);
  problem.A_row = rows ? line : 1, problem.A_col = rows ? 1 : line;
  problem.A_t = stride(kAt, -40 * H, 40 * H), problem.A_b = any_of(0, 2) ? stride(kAb, -30 * H, 30 * H) : 0;
  problem.b_t = stride(kbt, -3 * H, 3 * H), problem.b_b = stride(kbb, -2 * H, 2 * H);
  Range A, b;
  A.add(problem.A_t, kSteps), A.add(problem.A_b, 2), A.add(line, H), A.add(1, H);
  b.add(problem.b_t, kSteps), b.add(problem.b_b, 2), b.add(1, H);
  auto place = [&](Range range, int which) {
    range.high += stride(which, 0, 2 * piece), range.low -= stride(which, 0, 2 * piece);
    return guarded<T>(range.low, range.high);
  };
  problem.A = place(A, kA), problem.b = place(b, kb);
  alignas(16) static unsigned char memory[kBytes];
  auto run_lines = [&](auto* kernel) {
    std::memset(memory, 0xff, sizeof memory);
    shared = memory;
    emulator::launch(kernel, 1, 32, 1, 0, seed);
  };
  if constexpr (HP * sizeof(T) % 16 == 0) {
    if (weft::scan::lines_are_aligned(problem)) run_lines(kernel<T, HP, Aligned>);
  }
  run_lines(kernel<T, HP, Apart>);
  run_lines(kernel<T, HP, Together>);
}

template <typename T>
void run_type(int H, unsigned seed) {
  // Both rings of the kernels, the one of the products and the one of the replay.
  auto both = [&]<int HP, int kProduct>() {
    constexpr int kSize = int(sizeof(T));
    run_one<T, HP, kProduct>(H, seed);
    run_one<T, HP, (HP * kSize / 16 | 1) * 16 / kSize>(H, seed);
  };
  if (H <= 8) return both.template operator()<8, 8>();
  if (H <= 16) return both.template operator()<16, 24>();
  if (H <= 20) return both.template operator()<20, 24>();
  if (H <= 24) return both.template operator()<24, 24>();
  both.template operator()<32, 40>();
}

}  // namespace

// A problem of H, whose strides and addresses follow from the seed, with elements of SIZE bytes.
extern "C" void run(int H, unsigned seed) {
  using T = std::conditional_t<SIZE == 2, Half, std::conditional_t<SIZE == 4, float, double>>;
  weft::when.seed(seed);
  run_type<T>(H, seed);
}
