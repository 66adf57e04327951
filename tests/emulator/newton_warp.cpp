// The walkers of csrc/rnn/newton/cuda/newton_warp.cuh: the chunks of all sequences of a cell at once, at any speed; and
// the one walker of a sequence of forward_walk.cuh, where the number of chunks is 0.
// PADDED: the padded hidden size; SIZE: bytes of a number.
#include "emulator.h"
#include "shuffle.h"

inline emulator::Brought brought(uint32_t x) {
  return emulator::gather(&x, 1);
}
inline bool __all_sync(unsigned, bool x) {
  const emulator::Brought all = brought(x);
  return std::all_of(all, all + 32, [](const auto& lane) { return lane[0] != 0; });
}
inline unsigned __reduce_max_sync(unsigned, unsigned x) {
  const emulator::Brought all = brought(x);
  unsigned largest = 0;
  for (int lane = 0; lane < 32; ++lane) largest = std::max(largest, all[lane][0]);
  return largest;
}
inline void atomicMax(unsigned long long* to, unsigned long long x) {
  *to = std::max(*to, x);
}
inline double __shfl_xor_sync(unsigned mask, double x, int lanes) {
  return __shfl_sync(mask, x, emulator::current->lane ^ lanes);
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
inline float __int_as_float(int x) {
  return __uint_as_float(unsigned(x));
}
inline int __float_as_int(float x) {
  return int(__float_as_uint(x));
}
using std::isfinite;
struct alignas(16) double2 {
  double x, y;
};

#include "rnn/newton/cuda/newton_warp.cuh"

namespace {

using namespace weft::rnn;
using scalar = std::conditional_t<SIZE == 4, float, double>;
constexpr int HP = PADDED;

ScanShape shape;
WarpForward<scalar> args;
NewtonWarps warps;
std::vector<uint64_t> messages;

template <Cell cell>
void kernel() {
  auto& shared = *reinterpret_cast<ChunkWalk<cell, HP, scalar>::Shared*>(emulator::current->block->shared);
  walk_chunk<cell, HP, scalar>(shape, args, warps, shared);
}

template <Cell cell>
void whole() {
  walk_sequence<cell, HP>(
      shape, args, *reinterpret_cast<ForwardWalk<cell, HP, scalar, false>::Shared*>(emulator::current->block->shared));
}

}  // namespace

extern "C" int64_t run(const ScanShape* given, const WarpForward<scalar>* pointers, int64_t count, int64_t* statistics,
                       bool late, unsigned seed) {
  shape = *given, args = *pointers;
  warps = {cut_time(shape.T, count), nullptr, statistics};
  const TimeChunks& chunks = warps.chunks;
  weft::latest = late;
  weft::when.seed(seed);
  with_cell(shape.cell, [&]<Cell cell>() {
    if constexpr (scan_max_hidden(cell) > 0) {
      if (count == 0) {
        return emulator::launch(whole<cell>, int(shape.B), 32, 1,
                                sizeof(typename ForwardWalk<cell, HP, scalar, false>::Shared), seed);
      }
      messages.assign(shape.B * Messages<cell, HP, scalar>::count(chunks.count), 0);
      warps.messages = messages.data();
      emulator::launch(kernel<cell>, int(chunks.count * shape.B), 32, 1,
                       sizeof(typename ChunkWalk<cell, HP, scalar>::Shared), seed);
    }
  });
  return chunks.count;
}

extern "C" void cut(int64_t steps, int64_t count, int64_t* to) {
  const TimeChunks found = cut_time(steps, count);
  to[0] = found.count, to[1] = found.length;
}
extern "C" void choose(int64_t steps, int64_t sequences, int64_t walkers, int64_t shortest, int64_t* to) {
  const TimeChunks found = choose_chunks(steps, sequences, walkers, shortest);
  to[0] = found.count, to[1] = found.length;
}
extern "C" bool few(int64_t round, int64_t count, int64_t changed, int64_t closer, int64_t before) {
  return few_meet(round, count, changed, closer, before);
}
