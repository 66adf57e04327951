// A chain of sparse matrix-vector products as one kernel. Launched cooperatively, with as many blocks as are resident
// at once; between two products all blocks meet at a barrier in L2, about a microsecond, instead of a launch each.
// Where one cluster's blocks are enough they are one, and its barrier takes a fifth of that. What does not depend on
// the vector, the first elements of each row and where they lie, is read before the barrier. Rows are shared out over
// the grid's lane groups, a few samples at a time, as in csr_mm; vectors stay in L2, from which they are read with
// ld.cg, because another SM wrote them and L1 is not coherent. A diagonal is multiplied into what the next product
// reads, which saves its barrier; its own result is written by the way. Links travel in the kernel's parameters, kLinks
// of them a launch: nothing is copied to the device, and a captured graph holds all it needs.
#include <algorithm>

#include "common/cuda/ptx.jit.cuh"
#include "common/element.cuh"
#include "common/integers.h"
#include "common/launch.cuh"
#include "sparse/cuda/csr_chain_kernels.h"
#include "sparse/cuda/dispatch.cuh"
#include "sparse/cuda/grid_barrier.cuh"

namespace weft::sparse {
namespace {

constexpr int kThreads = 512;
constexpr int kLinks = 48;  // with the rest below the 4 KiB that every device takes
constexpr int kTile = 4;    // samples of one lane group at a time
constexpr int kTurns = 2;   // of a cluster's threads in a product: more take longer than the other barrier

struct Chain {
  CsrLink links[kLinks];
  int8_t lanes[kLinks];  // log2 of the lanes that share a row
  int count;
  int64_t batch;
  unsigned* counter;  // null: the grid is one cluster
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

constexpr int kAhead = 4;

// A lane's first row in a link and its first elements there; their values where the batch shares them.
template <typename I, typename T>
struct Ahead {
  int64_t begin, end;
  I col[kAhead];
  State<T> value[kAhead];
};

template <typename I, typename T>
__device__ __forceinline__ void read_ahead(Ahead<I, T>& ahead, const CsrLink& link, int lanes, int64_t batch) {
  ahead.begin = ahead.end = 0;
  const int64_t item = int64_t(blockIdx.x) * (kThreads >> lanes) + (threadIdx.x >> lanes);
  if (item >= (batch + kTile - 1) / kTile * link.rows) return;
  const int64_t row = item % link.rows;
  ahead.begin = static_cast<const I*>(link.crow)[row], ahead.end = static_cast<const I*>(link.crow)[row + 1];
  const int64_t own = ahead.begin + (threadIdx.x & ((1 << lanes) - 1));
#pragma unroll
  for (int u = 0; u < kAhead; ++u) {
    const int64_t e = own + (u << lanes);
    if (e >= ahead.end) break;
    ahead.col[u] = static_cast<const I*>(link.col)[e];
    if (!link.values_batch) ahead.value[u] = to_state(static_cast<const T*>(link.values)[e]);
  }
}

// kLanes lanes share a row. With kScaled x is a diagonal's input, and the diagonal is multiplied in.
template <typename I, typename T, int kLanes, bool kScaled>
__device__ __forceinline__ void multiply(const CsrLink& link, const CsrLink& diagonal, int64_t batch,
                                         const Ahead<I, T>& ahead) {
  using Acc = State<T>;
  const I *crow = static_cast<const I*>(link.crow), *col = static_cast<const I*>(link.col);
  const T *values = static_cast<const T*>(link.values), *scale = static_cast<const T*>(diagonal.values);
  const T* x = static_cast<const T*>(kScaled ? diagonal.x : link.x);
  const int lane = threadIdx.x % kLanes;
  const int64_t tiles = (batch + kTile - 1) / kTile, total = tiles * link.rows;
  const int64_t step = int64_t(gridDim.x) * (kThreads / kLanes);
  // A block's groups have the same number of turns, or a warp's lanes would miss each other's shuffles.
  const int64_t first_base = int64_t(blockIdx.x) * (kThreads / kLanes);
  for (int64_t base = first_base; base < total; base += step) {
    const int64_t item = base + threadIdx.x / kLanes;
    const bool real = item < total;
    const int64_t row = real ? item % link.rows : 0, first = real ? item / link.rows * kTile : 0;
    const int64_t count = real ? batch - first : 0;
    const bool known = base == first_base;
    const int64_t end = known ? ahead.end : real ? int64_t(crow[row + 1]) : 0;
    int64_t e = (known ? ahead.begin : real ? int64_t(crow[row]) : 0) + lane;
    Acc sum[kTile] = {};
    const auto add = [&](int64_t j, Acc v) {
#pragma unroll
      for (int s = 0; s < kTile; ++s) {
        if (s < count) {
          if (link.values_batch) v = to_state(values[(first + s) * link.values_batch + e]);
          Acc factor = load_l2(x + (first + s) * link.columns + j);
          if constexpr (kScaled) {
            factor = to_state(from_state<T>(to_state(scale[(first + s) * diagonal.values_batch + j]) * factor));
          }
          sum[s] += v * factor;
        }
      }
    };
    if (known) {
#pragma unroll
      for (int u = 0; u < kAhead; ++u, e += kLanes) {
        if (e < end) add(ahead.col[u], ahead.value[u]);
      }
    }
    for (; e < end; e += kLanes) add(col[e], link.values_batch ? Acc(0) : to_state(values[e]));
#pragma unroll
    for (int s = 0; s < kTile; ++s) {
#pragma unroll
      for (int other = kLanes / 2; other > 0; other /= 2) sum[s] += __shfl_xor_sync(0xffffffffu, sum[s], other);
      if (lane == 0 && s < count) static_cast<T*>(link.out)[(first + s) * link.rows + row] = from_state<T>(sum[s]);
    }
  }
}

template <typename I, typename T, bool kScaled>
__device__ __forceinline__ void multiply_by(int lanes, const CsrLink& link, const CsrLink& diagonal, int64_t batch,
                                            const Ahead<I, T>& ahead) {
  switch (lanes) {
    case 0:
      return multiply<I, T, 1, kScaled>(link, diagonal, batch, ahead);
    case 3:
      return multiply<I, T, 8, kScaled>(link, diagonal, batch, ahead);
    default:
      return multiply<I, T, 32, kScaled>(link, diagonal, batch, ahead);
  }
}

template <typename I, typename T>
__global__ void __launch_bounds__(kThreads) csr_chain_kernel(const __grid_constant__ Chain chain) {
  unsigned round = 0;
  Ahead<I, T> ahead;
  // The next product from link k on, which a diagonal may precede.
  const auto read_next = [&](int k) {
    if (k < chain.count && !chain.links[k].crow) ++k;
    if (k < chain.count && chain.links[k].crow) read_ahead(ahead, chain.links[k], chain.lanes[k], chain.batch);
  };
  read_next(0);
  for (int k = 0; k < chain.count; ++k) {
    const CsrLink& link = chain.links[k];
    if (link.crow) {
      multiply_by<I, T, false>(chain.lanes[k], link, link, chain.batch, ahead);
    } else {
      multiply_diagonal<T>(link, chain.batch);
      if (k + 1 < chain.count && chain.links[k + 1].crow) {
        ++k;
        multiply_by<I, T, true>(chain.lanes[k], chain.links[k], link, chain.batch, ahead);
      }
    }
    if (k + 1 < chain.count) {
      read_next(k + 1);
      if (chain.counter) {
        meet(chain.counter, round);
      } else {
        cluster::barrier();
      }
    }
  }
}

// log2 of the lanes that a row of average length keeps busy.
int8_t lanes_of(const CsrLink& link) {
  const int64_t length = link.nnz / std::max<int64_t>(link.rows, 1);
  return length >= 48 ? 5 : length >= 6 ? 3 : 0;
}

template <typename I, typename T>
void launch_chain(Chain& chain, const Counter& counter, cudaStream_t stream) {
  // No more blocks than have work: a barrier costs less among few.
  int64_t work = 1;
  for (int k = 0; k < chain.count; ++k) {
    const CsrLink& link = chain.links[k];
    const int64_t items =
        link.crow ? ceil_div(chain.batch, kTile) * link.rows << chain.lanes[k] : chain.batch * link.rows;
    work = std::max(work, ceil_div(items, kThreads));
  }
  constexpr const char* kName = "csr_chain";
  const auto kernel = csr_chain_kernel<I, T>;
  if (work <= kTurns * kLargestCluster) {
    const int64_t blocks = std::min<int64_t>(work, kLargestCluster);
    if (runs_in_clusters(kName, kernel, blocks, kThreads, 0)) {
      return launch_cluster(kName, kernel, blocks, kThreads, 0, stream, chain);
    }
  }
  chain.counter = counter();
  const int64_t blocks = std::min(work, resident_blocks(kName, kernel, kThreads, 0));
  launch_cooperative(kName, kernel, blocks, kThreads, 0, stream, chain);
}

}  // namespace

void csr_chain_cuda(const CsrLink* links, int64_t count, DType dtype, bool wide, int64_t batch, const Counter& counter,
                    cudaStream_t stream) {
  for (int64_t begin = 0; begin < count; begin += kLinks) {
    Chain chain{};
    chain.count = int(std::min<int64_t>(kLinks, count - begin)), chain.batch = batch;
    for (int k = 0; k < chain.count; ++k) {
      chain.links[k] = links[begin + k];
      chain.lanes[k] = lanes_of(links[begin + k]);
    }
    dispatch(wide, dtype, [&](auto* i, auto* t) {
      launch_chain<std::remove_pointer_t<decltype(i)>, std::remove_pointer_t<decltype(t)>>(chain, counter, stream);
    });
  }
}

}  // namespace weft::sparse
