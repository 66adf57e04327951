// The kernels of csrc/offload/cuda/zvc_tiles.cuh, compared with what zero-value compression is.
#include <set>
#include <utility>

#include "emulator.h"
#include "guarded.h"

inline emulator::Brought brought(uint32_t x) {
  return emulator::gather(&x, 1);
}
inline uint32_t __shfl_xor_sync(unsigned, uint32_t x, int lanes) {
  const int lane = emulator::current->lane;
  return brought(x)[lane ^ lanes][0];
}
inline uint32_t __shfl_up_sync(unsigned, uint32_t x, int lanes) {
  const int lane = emulator::current->lane;
  return brought(x)[lane < lanes ? lane : lane - lanes][0];
}
inline uint32_t __shfl_sync(unsigned, uint32_t x, int lane) {
  return brought(x)[lane][0];
}
inline unsigned __ballot_sync(unsigned, bool x) {
  const emulator::Brought all = brought(x);
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) bits |= all[i][0] << i;
  return bits;
}
inline unsigned __reduce_add_sync(unsigned, unsigned x) {
  const emulator::Brought all = brought(x);
  unsigned sum = 0;
  for (int i = 0; i < 32; ++i) sum += all[i][0];
  return sum;
}
inline int __popc(unsigned x) {
  return __builtin_popcount(x);
}
inline int __ffs(int x) {
  return __builtin_ffs(x);
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned byte = selector >> (4 * i) & 7;
    result |= ((byte < 4 ? x : y) >> (8 * (byte % 4)) & 0xff) << (8 * i);
  }
  return result;
}

inline uint4 __ldcs(const uint4* p) {
  return *p;
}
inline void __stcs(uint4* p, uint4 value) {
  *p = value;
}

#include "offload/cuda/zvc_tiles.cuh"
#include "offload/runs.h"

namespace {

using namespace weft::offload;

ZvcCompress compressing;
ZvcDecompress decompressing;
uint64_t* counters;
int* starts;
int64_t* totals;
int64_t blocks;

template <typename T>
T& shared() {
  return *reinterpret_cast<T*>(emulator::current->block->shared);
}
template <int kItem>
void compress_kernel() {
  compress_tiles<kItem>(compressing, counters, shared<CompressShared>());
}
template <int kItem>
void count_kernel() {
  count_tiles<kItem>(decompressing, blockIdx.x, starts, totals, &shared<int>());
}
template <int kItem>
void decompress_kernel() {
  decompress_tiles<kItem>(decompressing, blockIdx.x, blocks, starts, totals, shared<DecompressShared>());
}

void expect(bool condition, const char* what) {
  if (!condition) emulator::fail(what);
}

template <int kItem>
void run(int64_t n, int per_mille, int64_t offset, int64_t short_by, unsigned seed) {
  using T = typename Element<kItem>::T;
  std::mt19937 random(seed);
  const bool at_end = random() % 2;
  blocks = 1 + random() % 4;
  const Guarded x_memory((n + offset) * kItem, at_end);
  T* const x = x_memory.as<T>() + offset;
  std::vector<T> expected;
  std::vector<uint32_t> words((n + 31) / 32);
  for (int64_t i = 0; i < n; ++i) {
    x[i] = int(random() % 1000) < per_mille ? T(1 + random() % 0xffff) : T(0);
    // Bits of one byte alone, and of the highest alone, are bits.
    if (x[i] != 0 && random() % 4 == 0) x[i] = T(T(1) << random() % (8 * kItem));
    if (x[i] == 0) continue;
    expected.push_back(x[i]);
    words[i / 32] |= 1u << i % 32;
  }
  const auto size = int64_t(expected.size()), tiles = tiles_of<kPackWarps>(n, kItem);

  const int64_t capacity = std::max<int64_t>(size - short_by, 0);
  const Guarded mask(words.size() * 4, at_end), values((capacity + 1) / 2 * 2 * kItem, true);
  int64_t found = -1;
  std::vector<uint64_t> statuses(kStatuses + tiles);
  counters = statuses.data();
  // Room for those behind, as far as it has to be written: where it is, or not at all.
  const Guarded rest((size + 1) / 2 * 2 * kItem, true);
  const bool has_rest = random() % 2;
  compressing = {
      x, n, kItem, mask.as<uint32_t>(), values.as<void>(), capacity, &found, has_rest ? rest.as<void>() : nullptr};
  // Perhaps no tile but the first says more than its own count, as if all sums came too late.
  std::set<const void*> said;  // their own
  const bool sums_are_late = tiles > 32 || random() % 2;
  weft::lost = [&](const void* tile, uint64_t word, size_t) {
    if (word & kOwnCount) said.insert(tile);
    return word & kSumCount && said.erase(tile) && sums_are_late;
  };
  emulator::launch(compress_kernel<kItem>, int(blocks), kThreads + kWarp, 1, sizeof(CompressShared), seed);
  weft::lost = nullptr;
  expect(found == size, "size differs");
  expect(std::equal(words.begin(), words.end(), mask.as<uint32_t>()), "mask differs");
  expect(std::equal(expected.begin(), expected.begin() + capacity, values.as<T>()), "values differ");
  if (capacity % 2) expect(values.as<T>()[capacity] == T(0xa5a5a5a5), "more values than there is room for");
  for (int64_t k = 0; k < size; ++k)
    expect(rest.as<T>()[k] == (has_rest && k >= capacity ? expected[k] : T(0xa5a5a5a5)), "a value behind the room");

  const int64_t spread_tiles = tiles_of<kSpreadWarps>(n, kItem), groups = (spread_tiles + kGroup - 1) / kGroup;
  const int64_t value_offset = random() % 3;
  const Guarded packed((capacity + value_offset) * kItem, at_end || value_offset), out((n + offset) * kItem, at_end);
  std::copy_n(expected.begin(), capacity, packed.as<T>() + value_offset);
  std::vector<int> own_starts(spread_tiles);
  std::vector<int64_t> own_totals(groups);
  starts = own_starts.data(), totals = own_totals.data();
  // All values, n of them, in a place of their own or not at all.
  const int64_t all_offset = random() % 2 ? value_offset : random() % 5;
  const bool has_all = random() % 2;
  const Guarded all((n + all_offset) * kItem, false);
  std::copy(expected.begin(), expected.end(), all.as<T>() + all_offset);
  decompressing = {mask.as<uint32_t>(),
                   packed.as<T>() + value_offset,
                   capacity,
                   out.as<T>() + offset,
                   n,
                   kItem,
                   has_all ? all.as<T>() + all_offset : nullptr};
  emulator::launch(count_kernel<kItem>, int(groups), SpreadTile<kItem>::kThreads, 1, kGroup * sizeof(int), seed);
  int64_t sum = 0;
  for (int64_t& total : own_totals) sum += std::exchange(total, sum);
  expect(sum == size, "counts differ");
  emulator::launch(decompress_kernel<kItem>, int(blocks), SpreadTile<kItem>::kThreads, 1, sizeof(DecompressShared),
                   seed + 1);
  const T* const spread = out.as<T>() + offset;
  for (int64_t i = 0, k = 0; i < n; ++i) {
    if (x[i] != 0 && k++ >= capacity && !has_all) break;
    expect(spread[i] == x[i], "an element differs");
  }
}

}  // namespace

// n elements of SIZE bytes that begin `offset` elements into their memory, with room for all non-zeros but `short_by`.
extern "C" void run(int64_t n, int per_mille, int64_t offset, int64_t short_by, unsigned seed) {
  run<SIZE>(n, per_mille, offset, short_by, seed);
}

// Entries of runs that change at `places`, of n elements, summed up in parts that begin at `cuts`.
extern "C" int64_t entries(const int64_t* places, int64_t count, const int64_t* cuts, int64_t parts) {
  Changes all = Changes::start();
  for (int64_t p = 0, i = 0; p <= parts; ++p) {
    Changes part;
    for (const int64_t end = p < parts ? cuts[p] : count; i < end; ++i) part.add(places[i]);
    all = all.then(part);
  }
  return all.entries;
}
