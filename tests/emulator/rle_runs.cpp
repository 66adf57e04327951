// The kernels of csrc/offload/cuda/rle_runs.cu, compared with what run-length coding is.
#include "emulator.h"
#include "guarded.h"

inline int __popc(unsigned x) {
  return __builtin_popcount(x);
}
inline int __ffs(int x) {
  return __builtin_ffs(x);
}
inline uint32_t atomicXor(uint32_t* p, uint32_t x) {
  const uint32_t before = *p;
  *p ^= x;
  return before;
}

// Blocks run one after the other, so that what is static is a block's own.
#undef __shared__
#define __shared__ static
#include "offload/cuda/rle_runs.cu"

using namespace weft::offload;

static void expect(bool condition, const char* what) {
  if (!condition) emulator::fail(what);
}

// A mask of n elements, of which so many in a thousand begin a run of another kind; `rest` runs of 0 behind the others.
extern "C" void run(int64_t n, int per_mille, int64_t rest, unsigned seed) {
  std::mt19937 random(seed);
  weft::seed = seed;
  const bool at_end = random() % 2;
  const int64_t words = (n + 31) / 32;
  const Guarded mask_memory(4 * words, at_end), runs_memory(4 * (n + 1), at_end), back_memory(4 * words, at_end);
  auto* const mask = mask_memory.as<uint32_t>();
  std::memset(mask, 0, size_t(4 * words));
  std::vector<int32_t> expected;
  bool kind = false, set = random() % 2;
  int32_t length = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (int(random() % 1000) < per_mille) set = !set;
    if (set != kind) expected.push_back(length), length = 0, kind = set;
    ++length;
    if (set) mask[i / 32] |= 1u << (i % 32);
  }
  if (n > 0) expected.push_back(length);

  int64_t used = -1;
  const RleRuns out{mask, n, runs_memory.as<int32_t>(), &used};
  const Guarded out_workspace(rle_runs_workspace(out), at_end);
  rle_runs(out, out_workspace.as<void>(), nullptr);
  expect(used == int64_t(expected.size()), "another number of runs");
  for (int64_t i = 0; i <= n; ++i)
    expect(out.runs[i] == (i < used ? expected[size_t(i)] : 0), "a run of another length");

  const int64_t count = std::min(used + rest, n + 1);
  const RleMask in{out.runs, n == 0 ? 0 : count, back_memory.as<uint32_t>(), n};
  const Guarded in_workspace(rle_mask_workspace(in), at_end);
  rle_mask(in, in_workspace.as<void>(), nullptr);
  for (int64_t w = 0; w < words; ++w) expect(in.mask[w] == mask[w], "another mask came back");
}
