// A chain of sparse matrix-vector products as one kernel: of small vectors a cluster of blocks for each sample, see
// csr_chain_cluster.cuh. Of others all blocks of a grid, launched cooperatively, as many as are resident at once;
// between two products they meet at a barrier in L2, about a microsecond, instead of a launch each. What does not
// depend on the vector, the first elements of each row and where they lie, is read before the barrier. Rows are shared
// out over the grid's lane groups, a few samples at a time, as in csr_mm; vectors stay in L2, from which they are read
// with ld.cg, because another SM wrote them and L1 is not coherent. A diagonal is multiplied into what the next product
// reads, which saves its barrier; its own result is written by the way. Links travel in the kernel's parameters:
// nothing is copied to the device, and a captured graph holds all it needs.
#include <algorithm>
#include <bit>
#include <memory>

#include "common/element.cuh"
#include "common/integers.h"
#include "common/launch.cuh"
#include "sparse/cuda/csr_chain_cluster.cuh"
#include "sparse/cuda/csr_chain_kernels.h"
#include "sparse/cuda/dispatch.cuh"
#include "sparse/cuda/grid_barrier.cuh"
#include "sparse/cuda/launch_clusters.cuh"

namespace weft::sparse {
namespace {

constexpr int kThreads = 512;
constexpr int kLinks = 48;  // with the rest below the 4 KiB that every device takes
constexpr int kTile = 4;    // samples of one lane group at a time; of a single one, 1
constexpr int kTurns = 2;   // of a cluster's threads in a product, and of clusters: more take longer than the grid

struct Chain {
  CsrLink links[kLinks];
  int8_t lanes[kLinks];  // log2 of the lanes that share a row
  int count;
  int64_t batch;
  unsigned* counter;  // of the barrier
};
static_assert(sizeof(Chain) <= 4000);

template <typename T>
__device__ __forceinline__ State<T> load_l2(const T* p) {
  return to_state(__ldcg(p));
}

template <typename T>
__device__ __forceinline__ void multiply_diagonal(const CsrLink& link, int64_t batch) {
  const T *values = static_cast<const T*>(link.values), *x = static_cast<const T*>(link.x);
  T* out = static_cast<T*>(link.out);
  const int64_t total = batch * link.rows, step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < total; i += step) {
    const int64_t at = link.values_batch ? i : i % link.rows;
    out[i] = from_state<T>(to_state(values[at]) * load_l2(x + i));
  }
}

// Elements of a lane at a time: of most rows all, where registers are not for samples.
template <int kSamples>
constexpr int kAhead = kSamples == 1 ? 6 : 1;

// A lane's next elements of a row: columns, -1 where there is none, and the values that the batch shares.
template <typename I, typename T, int kSamples>
struct Part {
  I col[kAhead<kSamples>];
  State<T> value[kAhead<kSamples>];
};

template <typename I, typename T, int kSamples>
__device__ __forceinline__ Part<I, T, kSamples> read_part(const CsrLink& link, int64_t e, int64_t end, int lanes) {
  Part<I, T, kSamples> part;
#pragma unroll
  for (int u = 0; u < kAhead<kSamples>; ++u, e += lanes) {
    const bool real = e < end;
    part.col[u] = real ? static_cast<const I*>(link.col)[e] : I(-1);
    part.value[u] = real && !link.values_batch ? to_state(static_cast<const T*>(link.values)[e]) : State<T>(0);
  }
  return part;
}

// A lane's first row in a link and its first elements there: nothing that depends on the vector.
template <typename I, typename T, int kSamples>
struct Ahead {
  int64_t row, first, begin, end;  // `first` sample
  Part<I, T, kSamples> part;
};

template <typename I, typename T, int kSamples>
__device__ __forceinline__ void read_ahead(Ahead<I, T, kSamples>& ahead, const CsrLink& link, int lanes,
                                           int64_t batch) {
  const int64_t item = int64_t(blockIdx.x) * (kThreads >> lanes) + (threadIdx.x >> lanes);
  const int64_t tiles = (batch + kSamples - 1) / kSamples;
  const bool real = item < tiles * link.rows;
  ahead.row = !real ? 0 : tiles == 1 ? item : item % link.rows;
  ahead.first = !real || tiles == 1 ? 0 : item / link.rows * kSamples;
  ahead.begin = real ? int64_t(static_cast<const I*>(link.crow)[ahead.row]) : 0;
  ahead.end = real ? int64_t(static_cast<const I*>(link.crow)[ahead.row + 1]) : 0;
  ahead.part = read_part<I, T, kSamples>(link, ahead.begin + (threadIdx.x & ((1 << lanes) - 1)), ahead.end, 1 << lanes);
}

// kLanes lanes share a row. With kScaled x is a diagonal's input, and the diagonal is multiplied in.
template <typename I, typename T, int kSamples, int kLanes, bool kScaled>
__device__ __forceinline__ void multiply(const CsrLink& link, const CsrLink& diagonal, int64_t batch,
                                         const Ahead<I, T, kSamples>& ahead) {
  using Acc = State<T>;
  constexpr int kPart = kAhead<kSamples>;
  const I* crow = static_cast<const I*>(link.crow);
  const T *values = static_cast<const T*>(link.values), *scale = static_cast<const T*>(diagonal.values);
  const T* x = static_cast<const T*>(kScaled ? diagonal.x : link.x);
  const int lane = threadIdx.x % kLanes;
  const int64_t tiles = (batch + kSamples - 1) / kSamples, total = tiles * link.rows;
  const int64_t step = int64_t(gridDim.x) * (kThreads / kLanes);
  // A block's groups have the same number of turns, or a warp's lanes would miss each other's shuffles.
  const int64_t first_base = int64_t(blockIdx.x) * (kThreads / kLanes);
  for (int64_t base = first_base; base < total; base += step) {
    int64_t row = ahead.row, first = ahead.first, begin = ahead.begin, end = ahead.end;
    const bool known = base == first_base, real = base + threadIdx.x / kLanes < total;
    if (!known) {
      const int64_t item = real ? base + threadIdx.x / kLanes : 0;
      row = item % link.rows, first = item / link.rows * kSamples;
      begin = real ? int64_t(crow[row]) : 0, end = real ? int64_t(crow[row + 1]) : 0;
    }
    const int64_t count = real ? batch - first : 0;
    Acc sum[kSamples] = {};
    for (int64_t e = begin + lane; e < end; e += kPart * kLanes) {
      Part<I, T, kSamples> part =
          known && e == begin + lane ? ahead.part : read_part<I, T, kSamples>(link, e, end, kLanes);
      // All loads first: none waits for another.
      Acc factor[kPart][kSamples], value[kPart][kSamples];
#pragma unroll
      for (int u = 0; u < kPart; ++u) {
        const int64_t j = part.col[u];
#pragma unroll
        for (int s = 0; s < kSamples; ++s) {
          const bool there = j >= 0 && s < count;
          factor[u][s] = there ? load_l2(x + (first + s) * link.columns + j) : Acc(0);
          value[u][s] = part.value[u];
          if (link.values_batch && there) {
            value[u][s] = to_state(values[(first + s) * link.values_batch + e + u * kLanes]);
          }
          if constexpr (kScaled) {
            const Acc by = there ? to_state(scale[(first + s) * diagonal.values_batch + j]) : Acc(0);
            factor[u][s] = to_state(from_state<T>(by * factor[u][s]));
          }
        }
      }
#pragma unroll
      for (int u = 0; u < kPart; ++u) {
#pragma unroll
        for (int s = 0; s < kSamples; ++s) sum[s] += value[u][s] * factor[u][s];  // zeros where there is none
      }
    }
#pragma unroll
    for (int s = 0; s < kSamples; ++s) {
#pragma unroll
      for (int other = kLanes / 2; other > 0; other /= 2) sum[s] += __shfl_xor_sync(0xffffffffu, sum[s], other);
      if (lane == 0 && s < count) static_cast<T*>(link.out)[(first + s) * link.rows + row] = from_state<T>(sum[s]);
    }
  }
}

template <typename I, typename T, int kSamples, bool kScaled>
__device__ __forceinline__ void multiply_by(int lanes, const CsrLink& link, const CsrLink& diagonal, int64_t batch,
                                            const Ahead<I, T, kSamples>& ahead) {
  switch (lanes) {
    case 0:
      return multiply<I, T, kSamples, 1, kScaled>(link, diagonal, batch, ahead);
    case 3:
      return multiply<I, T, kSamples, 8, kScaled>(link, diagonal, batch, ahead);
    default:
      return multiply<I, T, kSamples, 32, kScaled>(link, diagonal, batch, ahead);
  }
}

template <typename I, typename T, int kSamples>
__global__ void __launch_bounds__(kThreads, kSamples == 1 || sizeof(T) == 8 ? 1 : 2)
    csr_chain_kernel(const __grid_constant__ Chain chain) {
  GridBarrier barrier{chain.counter};
  Ahead<I, T, kSamples> ahead;
  // The next product from link k on, which a diagonal may precede.
  const auto read_next = [&](int k) {
    if (k < chain.count && !chain.links[k].crow) ++k;
    if (k < chain.count && chain.links[k].crow) {
      read_ahead<I, T, kSamples>(ahead, chain.links[k], chain.lanes[k], chain.batch);
    }
  };
  read_next(0);
  for (int k = 0; k < chain.count; ++k) {
    const CsrLink& link = chain.links[k];
    if (link.crow) {
      multiply_by<I, T, kSamples, false>(chain.lanes[k], link, link, chain.batch, ahead);
    } else {
      if (k + 1 < chain.count && chain.links[k + 1].crow) {
        ++k;
        multiply_by<I, T, kSamples, true>(chain.lanes[k], chain.links[k], link, chain.batch, ahead);
      }
      multiply_diagonal<T>(link, chain.batch);  // after what others wait for
    }
    if (k + 1 < chain.count) {
      barrier.arrive();
      read_next(k + 1);
      barrier.wait();
    }
  }
}

// log2 of the lanes that a row of average length keeps busy.
int8_t lanes_of(const CsrLink& link) {
  const int64_t length = link.nnz / std::max<int64_t>(link.rows, 1);
  return length >= 48 ? 5 : length >= 6 ? 3 : 0;
}

template <typename I, typename T, int kSamples>
void launch_chain(Chain& chain, const Counter& counter, cudaStream_t stream) {
  // No more blocks than have work: a barrier costs less among few.
  int64_t work = 1;
  for (int k = 0; k < chain.count; ++k) {
    const CsrLink& link = chain.links[k];
    const int64_t items =
        link.crow ? ceil_div(chain.batch, kSamples) * link.rows << chain.lanes[k] : chain.batch * link.rows;
    work = std::max(work, ceil_div(items, kThreads));
  }
  constexpr const char* kName = "csr_chain";
  const auto kernel = csr_chain_kernel<I, T, kSamples>;
  chain.counter = counter();
  const int64_t blocks = std::min(work, resident_blocks(kName, kernel, kThreads, 0));
  launch_cooperative(kName, kernel, blocks, kThreads, 0, stream, chain);
}

int8_t cluster_lanes_of(const CsrLink& link) {
  return std::min<int8_t>(lanes_of(link), 3);
}

template <typename I, typename T, int kMost>
void launch_cluster_chain(const CsrLink* links, int64_t count, int64_t batch, int64_t blocks, int64_t room,
                          cudaStream_t stream) {
  const auto chain = std::make_unique<ClusterChain<kMost>>();
  for (int64_t k = 0; k < count; ++k) {
    const CsrLink& link = links[k];
    chain->links[k] = {link.crow,         link.col,       link.values,           link.out,
                       link.values_batch, int(link.rows), cluster_lanes_of(link)};
  }
  chain->count = int(count), chain->blocks = int(blocks), chain->columns = int(links[0].columns);
  chain->room = int(room), chain->x = links[0].x;
  launch_clusters("csr_chain_cluster", csr_chain_cluster_kernel<I, T, kMost>, batch, blocks, kClusterThreads,
                  cluster_bytes<T>(room), stream, *chain);
}

// Whether the chain has run by clusters, because its vectors are small.
template <typename I, typename T>
bool ran_in_clusters(const CsrLink* links, int64_t count, int64_t batch, cudaStream_t stream) {
  int64_t work = 1, longest = links[0].columns;
  for (int64_t k = 0; k < count; ++k) {
    longest = std::max(longest, links[k].rows);
    if (links[k].crow) work = std::max(work, ceil_div(links[k].rows << cluster_lanes_of(links[k]), kClusterThreads));
  }
  const int64_t room = ceil_div(longest, 4) * 4, processors = device_limits().sm_count;
  if (work > kTurns * kLargestCluster || cluster_bytes<T>(room) > 48 * 1024) return false;
  // A power of two: other sizes are not for every device.
  int64_t blocks = std::min<int64_t>(std::bit_ceil(uint64_t(work)), kLargestCluster);
  while (batch * blocks > processors && blocks * kTurns / 2 >= work) blocks /= 2;
  if (batch * blocks > kTurns * processors) return false;
  const auto kernel = csr_chain_cluster_kernel<I, T, kManyLinks>;
  if (!runs_in_clusters("csr_chain_cluster", kernel, blocks, kClusterThreads, cluster_bytes<T>(room))) return false;
  for (int64_t begin = 0; begin < count; begin += kManyLinks) {
    const int64_t part = std::min<int64_t>(kManyLinks, count - begin);
    part <= kFewLinks ? launch_cluster_chain<I, T, kFewLinks>(links + begin, part, batch, blocks, room, stream)
                      : launch_cluster_chain<I, T, kManyLinks>(links + begin, part, batch, blocks, room, stream);
  }
  return true;
}

}  // namespace

void csr_chain_cuda(const CsrLink* links, int64_t count, DType dtype, bool wide, int64_t batch, const Counter& counter,
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
      batch == 1 ? launch_chain<I, T, 1>(chain, counter, stream) : launch_chain<I, T, kTile>(chain, counter, stream);
    }
  });
}

}  // namespace weft::sparse
