// A chain of sparse matrix-vector products whose vectors are small: a cluster of blocks for each sample. Every block
// has the whole vector in its shared memory. A warp that has the sums of its rows multiplies the diagonals that follow,
// and sends the numbers to all blocks in messages of 16 bytes (st.async), whose arrival the receiver's barrier counts:
// half a microsecond from one product to the next, and nobody waits for what goes to global memory. Of the products to
// come, columns and values of each row's first elements are read into registers two products ahead, and where rows
// begin three ahead. Vectors of two products lie in turn in two buffers: a block that sends the product after next has
// received all of the next one, which others sent after they had received and read this one. So every block must have
// rows of every product that is not the last. A cluster of one block, in which st.async is not defined, stores the
// numbers in its own memory, and its threads meet.
#pragma once
#include "common/cuda/ptx.jit.cuh"
#include "common/element.cuh"
#include "sparse/csr_chain_args.h"
#include "sparse/cuda/link_values.cuh"

namespace weft::sparse {

constexpr int kClusterThreads = 512, kClusterWarps = kClusterThreads / 32;
constexpr int kClusterAhead = 6;  // elements of a row that a lane reads ahead

// A CsrLink without what the one before it tells.
struct ClusterLink {
  const void *crow, *col;  // null: diagonal
  const void *values, *source;
  void* out;
  int values_batch, reads;
  int rows;
  int lanes;  // log2 of the lanes that share a row: 0 or 3
};

template <int kLinks>
struct ClusterChain {
  ClusterLink links[kLinks];
  int count, blocks;  // blocks of a cluster
  int columns;        // of the first link
  int room;           // numbers of a buffer: a multiple of those in a message
  const void* x;
};
// Kernels take 4 KiB of parameters without more ado, and 32,764 bytes on every device of our compilers.
constexpr int kFewLinks = 70, kManyLinks = 570;
static_assert(sizeof(ClusterChain<kFewLinks>) <= 4000 && sizeof(ClusterChain<kManyLinks>) <= 32000);

template <typename T>
constexpr int kNumbers = 16 / sizeof(acc_t<T>);  // of a message

// Dynamic shared memory: two vectors and two barriers.
template <typename T>
constexpr size_t cluster_bytes(int64_t room) {
  return 2 * room * sizeof(acc_t<T>) + 16;
}

template <typename I>
struct RowEnds {
  I begin, end;
};

// What a lane knows of its first row in a product, without the vector.
template <typename I, typename T>
struct RowPart {
  RowEnds<I> ends;
  I col[kClusterAhead];   // -1: none
  I from[kClusterAhead];  // where its number is
  T value[kClusterAhead];
  T scale;  // of the diagonal that follows
};

template <typename I, typename T, typename Chain>
struct ClusterRun {
  const Chain& chain;
  const int sample, warp, lane;  // warp: of the cluster
  acc_t<T>* const buffers;
  const u32 barriers;

  // The first product from link k on.
  __device__ __forceinline__ int product_from(int k) const {
    while (k < chain.count && !chain.links[k].crow) ++k;
    return k;
  }
  __device__ __forceinline__ T diagonal_of(const ClusterLink& link, int i) const {
    return diagonal_number(static_cast<const T*>(link.values), int64_t(sample) * link.values_batch + i, link.reads);
  }
  // Of element e in `row`, which may wait for another number.
  __device__ __forceinline__ T number_of(const ClusterLink& link, I e, int row) const {
    const int64_t first = int64_t(sample) * link.values_batch;
    if (link.reads > 0) return picked<T>(link.values, first + static_cast<const I*>(link.col)[e], row, link.reads);
    return static_cast<const T*>(link.values)[first + (link.source ? static_cast<const I*>(link.source)[e] : e)];
  }
  __device__ __forceinline__ T* out_of(const ClusterLink& link) const {
    return static_cast<T*>(link.out) + int64_t(sample) * link.rows;
  }
  __device__ __forceinline__ int first_row(const ClusterLink& link) const {
    return warp * (32 >> link.lanes) + (lane >> link.lanes);
  }
  __device__ __forceinline__ RowEnds<I> ends_of(const ClusterLink& link, int row) const {
    if (row >= link.rows) return {0, 0};
    return {static_cast<const I*>(link.crow)[row], static_cast<const I*>(link.crow)[row + 1]};
  }
  __device__ __forceinline__ RowEnds<I> first_ends(int k) const {
    return k < chain.count ? ends_of(chain.links[k], first_row(chain.links[k])) : RowEnds<I>{0, 0};
  }

  __device__ __forceinline__ void read(RowPart<I, T>& part, int k, RowEnds<I> ends) const {
    if (k >= chain.count) return;
    const ClusterLink& link = chain.links[k];
    const I *col = static_cast<const I*>(link.col), *source = static_cast<const I*>(link.source);
    const T* values = static_cast<const T*>(link.values) + int64_t(sample) * link.values_batch;
    part.ends = ends;
    I e = ends.begin + (lane & ((1 << link.lanes) - 1));
#pragma unroll
    for (int u = 0; u < kClusterAhead; ++u, e += 1 << link.lanes) {
      part.col[u] = I(-1);
      if (e >= ends.end) continue;
      part.col[u] = col[e];
      if (source) {
        part.from[u] = source[e];
      } else if (link.reads == 0) {
        part.value[u] = values[e];
      }
    }
    const int row = first_row(link);
    if (k + 1 < chain.count && !chain.links[k + 1].crow && row < link.rows) {
      part.scale = diagonal_of(chain.links[k + 1], row);
    }
  }

  // Numbers whose places `read` has read, one product ahead.
  __device__ __forceinline__ void read_numbers(RowPart<I, T>& part, int k) const {
    if (k >= chain.count) return;
    const ClusterLink& link = chain.links[k];
    if (!link.source && link.reads == 0) return;
    const int64_t first = int64_t(sample) * link.values_batch;
    const int row = first_row(link);
#pragma unroll
    for (int u = 0; u < kClusterAhead; ++u) {
      if (part.col[u] < 0) continue;
      part.value[u] = link.source ? static_cast<const T*>(link.values)[first + part.from[u]]
                                  : picked<T>(link.values, first + part.col[u], row, link.reads);
    }
  }

  // That product p of the launch reads.
  __device__ __forceinline__ acc_t<T>* vector(int p) const {
    return buffers + (p & 1) * chain.room;
  }

  // Product p of the launch, of link k; sent where another one follows.
  template <int kLanes>
  __device__ __forceinline__ void multiply(int k, int p, const RowPart<I, T>& part, bool sent) const {
    constexpr int kRows = 32 / kLanes, kMessages = kRows / kNumbers<T>;  // of a warp
    const ClusterLink& link = chain.links[k];
    const acc_t<T>* x = vector(p);
    const I* col = static_cast<const I*>(link.col);
    const int first = warp * kRows, step = chain.blocks * kClusterWarps * kRows;
    for (int base = first; base < link.rows; base += step) {
      const int row = base + lane / kLanes;
      acc_t<T> sum = 0;
      RowEnds<I> ends = part.ends;
      I from = ends.begin + lane % kLanes;
      if (base == first) {
#pragma unroll
        for (int u = 0; u < kClusterAhead; ++u) {
          if (part.col[u] >= 0) sum += to_acc(part.value[u]) * x[part.col[u]];
        }
        from += kClusterAhead * kLanes;
      } else {
        ends = ends_of(link, row), from = ends.begin + lane % kLanes;
      }
      for (I e = from; e < ends.end; e += kLanes) sum += to_acc(number_of(link, e, row)) * x[col[e]];
#pragma unroll
      for (int other = kLanes / 2; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
      // Every result is rounded, as if it had come by itself.
      const bool real = row < link.rows, writes = real && lane % kLanes == 0;
      T number = from_acc<T>(real ? sum : acc_t<T>(0));
      if (writes) out_of(link)[row] = number;
      for (int d = k + 1; d < chain.count && !chain.links[d].crow; ++d) {
        const ClusterLink& diagonal = chain.links[d];
        if (real) {
          const T scale = d == k + 1 && base == first ? part.scale : diagonal_of(diagonal, row);
          number = from_acc<T>(to_acc(scale) * to_acc(number));
        }
        if (writes) out_of(diagonal)[row] = number;
      }
      if (!sent) continue;
      if (chain.blocks > 1) {
        send<kLanes, kMessages>(base, p, to_acc(number), link.rows);
      } else if (writes) {
        vector(p + 1)[row] = to_acc(number);
      }
    }
  }

  // Lane l sends message l % kMessages of its warp's, and to every (32 / kMessages)-th block.
  template <int kLanes, int kMessages>
  __device__ __forceinline__ void send(int base, int p, acc_t<T> number, int rows) const {
    const int message = lane % kMessages;
    acc_t<T> numbers[kNumbers<T>];
#pragma unroll
    for (int i = 0; i < kNumbers<T>; ++i) {
      numbers[i] = __shfl_sync(0xffffffffu, number, (message * kNumbers<T> + i) * kLanes);
    }
    const int row = base + message * kNumbers<T>;
    if (row >= rows) return;
    uint4 words;
    memcpy(&words, numbers, sizeof(words));
    const u32 to = shared_address(vector(p + 1) + row);
    for (int block = lane / kMessages; block < chain.blocks; block += 32 / kMessages) {
      cluster::send(cluster::address_in(block, to), words, cluster::address_in(block, barrier(p)));
    }
  }

  __device__ __forceinline__ u32 barrier(int p) const {
    return barriers + (p & 1) * 8;
  }

  // Of the product of link k: nothing where none is sent, because it is the last.
  __device__ __forceinline__ void expect(int p, int k) const {
    if (threadIdx.x != 0 || chain.blocks == 1 || product_from(k + 1) >= chain.count) return;
    mbarrier_expect(barrier(p), 16 * ((chain.links[k].rows + kNumbers<T> - 1) / kNumbers<T>));
  }

  // The vector that the launch begins with, in every block, with the diagonals before the first product.
  __device__ __forceinline__ void begin(int first) const {
    const T* x = static_cast<const T*>(chain.x) + int64_t(sample) * chain.columns;
    for (int i = threadIdx.x; i < chain.columns; i += kClusterThreads) {
      T number = x[i];
      for (int d = 0; d < first; ++d) {
        number = from_acc<T>(to_acc(diagonal_of(chain.links[d], i)) * to_acc(number));
        if (i / kClusterThreads % chain.blocks == int(blockIdx.x % chain.blocks)) out_of(chain.links[d])[i] = number;
      }
      buffers[i] = to_acc(number);
    }
  }
};

template <typename I, typename T, int kLinks>
__global__ void __launch_bounds__(kClusterThreads, 1)
    csr_chain_cluster_kernel(const __grid_constant__ ClusterChain<kLinks> chain) {
  acc_t<T>* buffers = reinterpret_cast<acc_t<T>*>(dynamic_shared_memory());
  const int rank = blockIdx.x % chain.blocks;
  const ClusterRun<I, T, ClusterChain<kLinks>> run{chain,
                                                   int(blockIdx.x / chain.blocks),
                                                   rank * kClusterWarps + int(threadIdx.x / 32),
                                                   int(threadIdx.x % 32),
                                                   buffers,
                                                   shared_address(buffers + 2 * chain.room)};
  int k = run.product_from(0), next = run.product_from(k + 1), after = run.product_from(next + 1), p = 0;
  if (threadIdx.x == 0) {
    mbarrier_init(run.barrier(0)), mbarrier_init(run.barrier(1));
    if (k < chain.count) run.expect(0, k);
    if (next < chain.count) run.expect(1, next);
  }
  RowPart<I, T> even, odd;
  run.read(even, k, run.first_ends(k));
  run.read(odd, next, run.first_ends(next));
  run.read_numbers(even, k);
  RowEnds<I> ends = run.first_ends(after);
  run.begin(k);
  __syncthreads();
  cluster::barrier();
  // One product; false after the last.
  const auto turn = [&](RowPart<I, T>& part, RowPart<I, T>& following) {
    const bool sent = next < chain.count;
    chain.links[k].lanes == 0 ? run.template multiply<1>(k, p, part, sent) : run.template multiply<8>(k, p, part, sent);
    if (!sent) return false;
    const int later = run.product_from(after + 1);
    run.read_numbers(following, next);
    run.read(part, after, ends);
    ends = run.first_ends(later);
    if (chain.blocks > 1) mbarrier_wait<true>(run.barrier(p), (p >> 1) & 1);
    // All warps have seen this phase before the barrier can begin the one after next, which looks the same; those of a
    // single block have stored and read their numbers.
    __syncthreads();
    if (after < chain.count) run.expect(p, after);
    k = next, next = after, after = later, ++p;
    return true;
  };
  if (k < chain.count) {
    while (turn(even, odd) && turn(odd, even)) {
    }
  }
  // A block that has begun its last product has received all that is ever sent to it, and may leave.
}

}  // namespace weft::sparse
