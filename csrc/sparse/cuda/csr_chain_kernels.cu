// A chain of sparse matrix-vector products as one kernel: of small vectors a cluster of blocks for each sample, see
// csr_chain_cluster.cuh. Of others all blocks of a grid, launched cooperatively, as many as are resident at once;
// between two products they meet at a barrier in L2, about a microsecond, instead of a launch each. What does not
// depend on the vector, the first elements of each row and where they lie, is read before the barrier. Rows are shared
// out over the grid's lane groups, a tile of samples at a time. The vector that the next product reads, with the
// diagonals before it multiplied in, lies in L2 a second time, the numbers of these samples side by side: an element
// finds them in one place, and what it reads is what bounds a batch. A lane has four samples; of a large batch four
// lanes share an element, so that its numbers are two whole sectors, and the matrix is read once for 16 samples. It is
// read with ld.cg, because another SM wrote it and L1 is not coherent. Links travel in the kernel's parameters: nothing
// is copied to the device, and a captured graph holds all it needs.
#include <algorithm>
#include <bit>
#include <limits>
#include <memory>

#include "common/cuda/grid_barrier.jit.cuh"
#include "common/element.cuh"
#include "common/integers.h"
#include "common/launch.cuh"
#include "sparse/cuda/csr_chain_cluster.cuh"
#include "sparse/cuda/csr_chain_kernels.h"
#include "sparse/cuda/dispatch.cuh"
#include "sparse/cuda/link_values.cuh"

namespace weft::sparse {
namespace {

constexpr int kThreads = 512;
constexpr int kLinks = 40;  // with the rest below the 4 KiB that every device takes
constexpr int kOfLane = 4;  // samples of a lane at a time; of a single one, 1
constexpr int kSpread = 4;  // lanes that share an element of a larger batch
constexpr int kTurns = 2;   // of a cluster's threads in a product, and of clusters: more take longer than the grid

struct Chain {
  CsrLink links[kLinks];
  int8_t lanes[kLinks];  // log2 of the lanes that share a row
  int count;
  int64_t batch;
  unsigned* counter;  // of the barrier
  void* beside[2];    // vectors with samples side by side, of two products in turn
};
static_assert(sizeof(Chain) <= 4000);

// Numbers of a lane's samples at one place of a vector. Those of a tile, kLanesOver lanes' own, lie side by side.
template <typename T, int kSamples>
struct alignas(kSamples == 1 || sizeof(T) >= 4 ? (kSamples == 1 ? sizeof(T) : 16) : kSamples * sizeof(T)) Beside {
  T v[kSamples];
};

template <typename T, int kSamples>
__device__ __forceinline__ Beside<T, kSamples> load_l2(const Beside<T, kSamples>* p) {
  Beside<T, kSamples> numbers;
  if constexpr (kSamples == 1) {
    numbers.v[0] = __ldcg(p->v);
  } else {
    using Words = std::conditional_t<sizeof(numbers) == sizeof(uint2), uint2, uint4>;
    Words words[sizeof(numbers) / sizeof(Words)];
#pragma unroll
    for (int i = 0; i < int(sizeof(numbers) / sizeof(Words)); ++i) {
      words[i] = __ldcg(reinterpret_cast<const Words*>(p) + i);
    }
    memcpy(&numbers, words, sizeof(numbers));
  }
  return numbers;
}

// Elements of a lane at a time: of most rows all, where registers are not for samples.
template <int kSamples>
constexpr int kAhead = kSamples == 1 ? 6 : 2;

// A lane's next elements of a row: columns, -1 where there is none, and the values that the batch shares.
template <typename I, typename T, int kSamples>
struct Part {
  I col[kAhead<kSamples>];
  acc_t<T> value[kAhead<kSamples>];
};

template <typename I, typename T, int kSamples>
__device__ __forceinline__ Part<I, T, kSamples> read_part(const CsrLink& link, I e, I end, int lanes) {
  Part<I, T, kSamples> part;
#pragma unroll
  for (int u = 0; u < kAhead<kSamples>; ++u, e += lanes) {
    const bool real = e < end;
    part.col[u] = real ? static_cast<const I*>(link.col)[e] : I(-1);
    const I at = real && link.source ? static_cast<const I*>(link.source)[e] : e;
    part.value[u] = real && !link.values_batch ? to_acc(static_cast<const T*>(link.values)[at]) : acc_t<T>(0);
  }
  return part;
}

// Of sample b in row `row`.
template <typename T>
__device__ __forceinline__ T diagonal_value(const CsrLink& diagonal, int64_t b, int64_t row) {
  return diagonal_number(static_cast<const T*>(diagonal.values), b * diagonal.values_batch + row, diagonal.reads);
}

// A lane's first row in a link and its first elements there: nothing that depends on the vector. `scale`: of the
// diagonal that follows, for the samples that the lane writes.
template <typename I, typename T, int kSamples>
struct Ahead {
  I row, tile, begin, end;
  Part<I, T, kSamples> part;
  T scale[kSamples];
};

template <typename I, typename T, int kSamples, int kLanesOver>
__device__ __forceinline__ void read_ahead(Ahead<I, T, kSamples>& ahead, const Chain& chain, int k) {
  constexpr int kTile = kSamples * kLanesOver;
  const CsrLink& link = chain.links[k];
  const int lanes = chain.lanes[k], elements = (1 << lanes) / kLanesOver;  // at a time
  const int lane = threadIdx.x & ((1 << lanes) - 1), own = lane / kLanesOver;
  const int64_t item = int64_t(blockIdx.x) * (kThreads >> lanes) + (threadIdx.x >> lanes);
  const int64_t tiles = (chain.batch + kTile - 1) / kTile;
  const bool real = item < tiles * link.rows;
  ahead.row = I(!real ? 0 : tiles == 1 ? item : item % link.rows);
  ahead.tile = I(!real || tiles == 1 ? 0 : item / link.rows);
  const int64_t first = int64_t(ahead.tile) * kTile + lane % kLanesOver * kSamples;
  ahead.begin = real ? static_cast<const I*>(link.crow)[ahead.row] : I(0);
  ahead.end = real ? static_cast<const I*>(link.crow)[ahead.row + 1] : I(0);
  const bool scaled = real && k + 1 < chain.count && !chain.links[k + 1].crow;
#pragma unroll
  for (int s = 0; s < kSamples; ++s) {
    if (scaled && own == (s & (elements - 1)) && first + s < chain.batch) {
      ahead.scale[s] = diagonal_value<T>(chain.links[k + 1], first + s, ahead.row);
    }
  }
  ahead.part = read_part<I, T, kSamples>(link, I(ahead.begin + own), ahead.end, elements);
}

// The product of link k and the diagonals after it, from x to `to`. kLanes lanes share a row.
template <typename I, typename T, int kSamples, int kLanesOver, int kLanes>
__device__ __forceinline__ void multiply(const Chain& chain, int k, const Beside<T, kSamples>* x,
                                         Beside<T, kSamples>* to, const Ahead<I, T, kSamples>& ahead) {
  using Acc = acc_t<T>;
  constexpr int kPart = kAhead<kSamples>, kTile = kSamples * kLanesOver, kElements = kLanes / kLanesOver;
  const CsrLink& link = chain.links[k];
  const I* crow = static_cast<const I*>(link.crow);
  const T* values = static_cast<const T*>(link.values);
  const int own = threadIdx.x % kLanes / kLanesOver, part_of_tile = threadIdx.x % kLanesOver;
  const int64_t tiles = (chain.batch + kTile - 1) / kTile, total = tiles * link.rows;
  const int64_t step = int64_t(gridDim.x) * (kThreads / kLanes);
  // A block's groups have the same number of turns, or a warp's lanes would miss each other's shuffles.
  const int64_t first_base = int64_t(blockIdx.x) * (kThreads / kLanes);
  for (int64_t base = first_base; base < total; base += step) {
    I row = ahead.row, tile = ahead.tile, begin = ahead.begin, end = ahead.end;
    const bool known = base == first_base, real = base + threadIdx.x / kLanes < total;
    if (!known) {
      const int64_t item = real ? base + threadIdx.x / kLanes : 0;
      row = I(item % link.rows), tile = I(item / link.rows);
      begin = real ? crow[row] : I(0), end = real ? crow[row + 1] : I(0);
    }
    const int64_t first = int64_t(tile) * kTile + part_of_tile * kSamples, left = chain.batch - first;
    const int count = real ? int(left < kSamples ? left : kSamples) : 0;
    const Beside<T, kSamples>* numbers = x + tile * link.columns * kLanesOver + part_of_tile;
    Acc sum[kSamples] = {};
    Part<I, T, kSamples> part = known ? ahead.part : read_part<I, T, kSamples>(link, I(begin + own), end, kElements);
    for (I e = begin + own; e < end; e += kPart * kElements) {
      // All loads first, of the next elements' places and values too: none waits for another.
      Beside<T, kSamples> factor[kPart];
      T value[kPart][kSamples];
#pragma unroll
      for (int u = 0; u < kPart; ++u) {
        if (part.col[u] >= 0) factor[u] = load_l2(numbers + int64_t(part.col[u]) * kLanesOver);
#pragma unroll
        for (int s = 0; s < kSamples; ++s) {
          if (link.values_batch && part.col[u] >= 0 && s < count) {
            const int64_t at = (first + s) * link.values_batch;
            value[u][s] = link.reads > 0 ? picked<T>(link.values, at + part.col[u], row, link.reads)
                                         : values[at + e + u * kElements];
          }
        }
      }
      const Part<I, T, kSamples> next = read_part<I, T, kSamples>(link, I(e + kPart * kElements), end, kElements);
#pragma unroll
      for (int u = 0; u < kPart; ++u) {
#pragma unroll
        for (int s = 0; s < kSamples; ++s) {
          if (part.col[u] >= 0 && s < count) {
            sum[s] += (link.values_batch ? to_acc(value[u][s]) : part.value[u]) * to_acc(factor[u].v[s]);
          }
        }
      }
      part = next;
    }
#pragma unroll
    for (int s = 0; s < kSamples; ++s) {
#pragma unroll
      for (int other = kLanes / 2; other >= kLanesOver; other /= 2) {
        sum[s] += __shfl_xor_sync(0xffffffffu, sum[s], other);
      }
      if (own != s % kElements || s >= count) continue;
      // Every result is rounded, as if it had come by itself.
      T number = from_acc<T>(sum[s]);
      static_cast<T*>(link.out)[(first + s) * link.rows + row] = number;
      for (int d = k + 1; d < chain.count && !chain.links[d].crow; ++d) {
        const CsrLink& diagonal = chain.links[d];
        const T scale = known && d == k + 1 ? ahead.scale[s] : diagonal_value<T>(diagonal, first + s, row);
        number = from_acc<T>(to_acc(scale) * to_acc(number));
        static_cast<T*>(diagonal.out)[(first + s) * link.rows + row] = number;
      }
      to[(tile * link.rows + row) * kLanesOver + part_of_tile].v[s] = number;
    }
  }
}

// The vector that the launch begins with, side by side, with the diagonals before the product of link `first`.
template <typename T, int kSamples, int kLanesOver>
__device__ __forceinline__ void begin(const Chain& chain, int first, Beside<T, kSamples>* to) {
  constexpr int kTile = kSamples * kLanesOver;
  const int64_t n = chain.links[0].columns, total = chain.batch * n, step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < total; i += step) {
    T number = static_cast<const T*>(chain.links[0].x)[i];
    const int64_t b = i / n, place = i - b * n;
    for (int d = 0; d < first; ++d) {
      number = from_acc<T>(to_acc(diagonal_value<T>(chain.links[d], b, place)) * to_acc(number));
      static_cast<T*>(chain.links[d].out)[i] = number;
    }
    to[(b / kTile * n + place) * kLanesOver + b % kTile / kSamples].v[b % kSamples] = number;
  }
}

template <typename I, typename T, int kSamples, int kLanesOver>
__global__ void __launch_bounds__(kThreads, kSamples == 1 || sizeof(T) == 8 ? 1 : 2)
    csr_chain_kernel(const __grid_constant__ Chain chain) {
  unsigned arrived = 0;  // of all blocks, at the barriers so far
  Ahead<I, T, kSamples> ahead;
  const auto product_from = [&](int k) {
    while (k < chain.count && !chain.links[k].crow) ++k;
    return k;
  };
  auto *x = static_cast<Beside<T, kSamples>*>(chain.beside[0]),
       *to = static_cast<Beside<T, kSamples>*>(chain.beside[1]);
  const Beside<T, kSamples>* from = x;
  int k = product_from(0);
  if (k < chain.count) read_ahead<I, T, kSamples, kLanesOver>(ahead, chain, k);
  if (kSamples == 1 && k == 0) {
    from = static_cast<const Beside<T, kSamples>*>(chain.links[0].x);  // as it is
  } else {
    begin<T, kSamples, kLanesOver>(chain, k, x);
    meet(chain.counter, arrived);
  }
  while (k < chain.count) {
    if (chain.lanes[k] == 5) {
      multiply<I, T, kSamples, kLanesOver, 32>(chain, k, from, to, ahead);
    } else if (kLanesOver == 1 && chain.lanes[k] == 3) {
      multiply<I, T, kSamples, kLanesOver, kLanesOver == 1 ? 8 : 32>(chain, k, from, to, ahead);
    } else {
      multiply<I, T, kSamples, kLanesOver, kLanesOver>(chain, k, from, to, ahead);
    }
    const int next = product_from(k + 1);
    if (next < chain.count) {
      group_signal(chain.counter);
      read_ahead<I, T, kSamples, kLanesOver>(ahead, chain, next);
      group_wait(chain.counter, arrived += gridDim.x);
    }
    auto* const written = to;
    to = x, x = written, from = written, k = next;
  }
}

// log2 of the lanes that a row of average length keeps busy.
int8_t lanes_of(const CsrLink& link) {
  const int64_t length = link.nnz / std::max<int64_t>(link.rows, 1);
  return length >= 48 ? 5 : length >= 6 ? 3 : 0;
}

template <typename I, typename T, int kSamples, int kLanesOver>
void launch_chain(Chain& chain, const Scratch& scratch, cudaStream_t stream) {
  // No more blocks than have work: a barrier costs less among few.
  const int64_t tiles = ceil_div(chain.batch, kSamples * kLanesOver);
  int64_t work = 1, longest = chain.links[0].columns;
  for (int k = 0; k < chain.count; ++k) {
    const CsrLink& link = chain.links[k];
    // Eight elements of a row at a time, or one, where each takes several lanes.
    if (kLanesOver > 1) chain.lanes[k] = chain.lanes[k] == 0 ? int8_t(std::countr_zero(unsigned(kLanesOver))) : 5;
    const int64_t items = link.crow ? tiles * link.rows << chain.lanes[k] : chain.batch * link.rows;
    work = std::max(work, ceil_div(items, kThreads)), longest = std::max(longest, link.rows);
  }
  constexpr const char* kName = "csr_chain";
  const auto kernel = csr_chain_kernel<I, T, kSamples, kLanesOver>;
  const int64_t bytes = tiles * longest * kLanesOver * int64_t(sizeof(Beside<T, kSamples>));
  for (void*& beside : chain.beside) beside = scratch(bytes, false);
  chain.counter = static_cast<unsigned*>(scratch(sizeof(unsigned), true));
  const int64_t blocks = std::min(work, resident_blocks(kName, kernel, kThreads, 0));
  launch_cooperative(kName, kernel, blocks, kThreads, 0, stream, chain);
}

int8_t cluster_lanes_of(const CsrLink& link) {
  return std::min<int8_t>(lanes_of(link), 3);
}

// Whether the device has run the chain in clusters of so many blocks.
template <typename I, typename T, int kMost>
bool ran_in_clusters_of(int64_t blocks, int64_t room, const CsrLink* links, int64_t count, int64_t batch,
                        cudaStream_t stream) {
  constexpr const char* kName = "csr_chain_cluster";
  const auto kernel = csr_chain_cluster_kernel<I, T, kMost>;
  if (!runs_in_clusters(kName, kernel, blocks, kClusterThreads, cluster_bytes<T>(room))) return false;
  const auto chain = std::make_unique<ClusterChain<kMost>>();
  for (int64_t begin = 0; begin < count; begin += kMost) {
    const CsrLink* own = links + begin;
    chain->count = int(std::min<int64_t>(kMost, count - begin)), chain->blocks = int(blocks);
    chain->columns = int(own[0].columns), chain->room = int(room), chain->x = own[0].x;
    for (int k = 0; k < chain->count; ++k) {
      chain->links[k] = {own[k].crow,       own[k].col,       own[k].values,
                         own[k].source,     own[k].out,       int(own[k].values_batch),
                         int(own[k].reads), int(own[k].rows), cluster_lanes_of(own[k])};
    }
    launch_clusters(kName, kernel, batch, blocks, kClusterThreads, cluster_bytes<T>(room), stream, *chain);
  }
  return true;
}

// Whether the chain has run by clusters, because its vectors are small.
template <typename I, typename T>
bool ran_in_clusters(const CsrLink* links, int64_t count, int64_t batch, cudaStream_t stream) {
  int64_t work = 1, longest = links[0].columns, least = kLargestCluster, last = least;
  for (int64_t k = 0; k < count; ++k) {
    longest = std::max(longest, links[k].rows);
    if (links[k].values_batch > std::numeric_limits<int>::max()) return false;
    if (!links[k].crow) continue;
    const int64_t busy = ceil_div(links[k].rows << cluster_lanes_of(links[k]), kClusterThreads);
    // Every block must have rows of all products but the last, see the kernel.
    work = std::max(work, busy), least = std::min(least, last), last = std::max<int64_t>(busy, 1);
  }
  const int64_t room = ceil_div(longest, 4) * 4, processors = device_limits().sm_count;
  if (cluster_bytes<T>(room) > 48 * 1024) return false;
  // A power of two: other sizes are not for every device.
  int64_t blocks = std::min<int64_t>(std::bit_ceil(uint64_t(work)), std::bit_floor(uint64_t(least)));
  while (blocks > 1 && batch * blocks > processors && blocks * kTurns / 2 >= work) blocks /= 2;
  if (work > kTurns * blocks || batch * blocks > kTurns * processors) return false;
  return count <= kFewLinks ? ran_in_clusters_of<I, T, kFewLinks>(blocks, room, links, count, batch, stream)
                            : ran_in_clusters_of<I, T, kManyLinks>(blocks, room, links, count, batch, stream);
}

}  // namespace

void csr_chain_cuda(const CsrLink* links, int64_t count, DType dtype, bool wide, int64_t batch, const Scratch& scratch,
                    cudaStream_t stream) {
  dispatch(wide, dtype, [&](auto* i, auto* t) {
    using I = std::remove_pointer_t<decltype(i)>;
    using T = std::remove_pointer_t<decltype(t)>;
    if (ran_in_clusters<I, T>(links, count, batch, stream)) return;
    for (int64_t begin = 0; begin < count; begin += kLinks) {
      Chain chain{};
      chain.count = int(std::min<int64_t>(kLinks, count - begin)), chain.batch = batch;
      for (int k = 0; k < chain.count; ++k) {
        chain.links[k] = links[begin + k];
        chain.lanes[k] = lanes_of(links[begin + k]);
      }
      if (batch == 1) {
        launch_chain<I, T, 1, 1>(chain, scratch, stream);
      } else if (batch <= 2 * kOfLane) {
        launch_chain<I, T, kOfLane, 1>(chain, scratch, stream);
      } else {
        launch_chain<I, T, kOfLane, kSpread>(chain, scratch, stream);
      }
    }
  });
}

}  // namespace weft::sparse
