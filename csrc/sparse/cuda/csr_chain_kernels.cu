// A chain of sparse matrix-vector products as one kernel. Launched cooperatively, with as many blocks as are resident
// at once; between two products all blocks meet at a barrier in L2, about a microsecond, instead of a launch each.
// Rows are shared out over the grid's lane groups, a few samples at a time, as in csr_mm; vectors stay in L2, from
// which they are read with ld.cg, because another SM wrote them and L1 is not coherent. A diagonal is multiplied into
// what the next product reads, which saves its barrier; its own result is written by the way. Links travel in the
// kernel's parameters, kLinks of them a launch: nothing is copied to the device, and a captured graph holds all it
// needs.
#include <algorithm>

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

struct Chain {
  CsrLink links[kLinks];
  int8_t lanes[kLinks];  // log2 of the lanes that share a row
  int count;
  int64_t batch;
  unsigned* counter;
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

// kLanes lanes share a row. With kScaled x is a diagonal's input, and the diagonal is multiplied in.
template <typename I, typename T, int kLanes, bool kScaled>
__device__ __forceinline__ void multiply(const CsrLink& link, const CsrLink& diagonal, int64_t batch) {
  using Acc = State<T>;
  const I *crow = static_cast<const I*>(link.crow), *col = static_cast<const I*>(link.col);
  const T *values = static_cast<const T*>(link.values), *scale = static_cast<const T*>(diagonal.values);
  const T* x = static_cast<const T*>(kScaled ? diagonal.x : link.x);
  const int lane = threadIdx.x % kLanes;
  const int64_t tiles = (batch + kTile - 1) / kTile, total = tiles * link.rows;
  const int64_t step = int64_t(gridDim.x) * (kThreads / kLanes);
  // A block's groups have the same number of turns, or a warp's lanes would miss each other's shuffles.
  for (int64_t base = int64_t(blockIdx.x) * (kThreads / kLanes); base < total; base += step) {
    const int64_t item = base + threadIdx.x / kLanes;
    const bool real = item < total;
    const int64_t row = real ? item % link.rows : 0, first = real ? item / link.rows * kTile : 0;
    const int64_t count = real ? batch - first : 0;
    const int64_t end = real ? int64_t(crow[row + 1]) : 0;
    Acc sum[kTile] = {};
    for (int64_t e = (real ? int64_t(crow[row]) : 0) + lane; e < end; e += kLanes) {
      const int64_t j = col[e];
      Acc v = link.values_batch ? Acc(0) : to_state(values[e]);
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
    }
#pragma unroll
    for (int s = 0; s < kTile; ++s) {
#pragma unroll
      for (int other = kLanes / 2; other > 0; other /= 2) sum[s] += __shfl_xor_sync(0xffffffffu, sum[s], other);
      if (lane == 0 && s < count) static_cast<T*>(link.out)[(first + s) * link.rows + row] = from_state<T>(sum[s]);
    }
  }
}

template <typename I, typename T, bool kScaled>
__device__ __forceinline__ void multiply_by(int lanes, const CsrLink& link, const CsrLink& diagonal, int64_t batch) {
  switch (lanes) {
    case 0:
      return multiply<I, T, 1, kScaled>(link, diagonal, batch);
    case 3:
      return multiply<I, T, 8, kScaled>(link, diagonal, batch);
    default:
      return multiply<I, T, 32, kScaled>(link, diagonal, batch);
  }
}

template <typename I, typename T>
__global__ void __launch_bounds__(kThreads) csr_chain_kernel(const __grid_constant__ Chain chain) {
  unsigned round = 0;
  for (int k = 0; k < chain.count; ++k) {
    const CsrLink& link = chain.links[k];
    if (link.crow) {
      multiply_by<I, T, false>(chain.lanes[k], link, link, chain.batch);
    } else {
      multiply_diagonal<T>(link, chain.batch);
      if (k + 1 < chain.count && chain.links[k + 1].crow) {
        ++k;
        multiply_by<I, T, true>(chain.lanes[k], chain.links[k], link, chain.batch);
      }
    }
    if (k + 1 < chain.count) meet(chain.counter, round);
  }
}

// log2 of the lanes that a row of average length keeps busy.
int8_t lanes_of(const CsrLink& link) {
  const int64_t length = link.nnz / std::max<int64_t>(link.rows, 1);
  return length >= 48 ? 5 : length >= 6 ? 3 : 0;
}

template <typename I, typename T>
void launch_chain(Chain& chain, cudaStream_t stream) {
  // No more blocks than have work: a barrier costs less among few.
  int64_t work = 1;
  for (int k = 0; k < chain.count; ++k) {
    const CsrLink& link = chain.links[k];
    const int64_t items =
        link.crow ? ceil_div(chain.batch, kTile) * link.rows << chain.lanes[k] : chain.batch * link.rows;
    work = std::max(work, ceil_div(items, kThreads));
  }
  const int64_t blocks = std::min(work, resident_blocks("csr_chain", csr_chain_kernel<I, T>, kThreads, 0));
  launch_cooperative("csr_chain", csr_chain_kernel<I, T>, blocks, kThreads, 0, stream, chain);
}

}  // namespace

void csr_chain_cuda(const CsrLink* links, int64_t count, DType dtype, bool wide, int64_t batch, unsigned* counter,
                    cudaStream_t stream) {
  for (int64_t begin = 0; begin < count; begin += kLinks) {
    // The counter is zero again for every launch, in the order of the stream.
    if (begin > 0) cuda_check(cudaMemsetAsync(counter, 0, sizeof(unsigned), stream), "csr_chain");
    Chain chain{};
    chain.count = int(std::min<int64_t>(kLinks, count - begin)), chain.batch = batch, chain.counter = counter;
    for (int k = 0; k < chain.count; ++k) {
      chain.links[k] = links[begin + k];
      chain.lanes[k] = lanes_of(links[begin + k]);
    }
    dispatch(wide, dtype, [&](auto* i, auto* t) {
      launch_chain<std::remove_pointer_t<decltype(i)>, std::remove_pointer_t<decltype(t)>>(chain, stream);
    });
  }
}

}  // namespace weft::sparse
