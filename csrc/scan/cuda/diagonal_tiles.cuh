// x[t] = A[t] * x[t-1] + b[t], A diagonal, and its gradients, in one pass over memory for any shape. B * H independent
// channels; the order of processing is that of linear_scan_args.h, so that gradients are a scan, too:
//   lambda[k] = A[k] lambda[k-1] + grad[k],  grad_A[k] = lambda[k] x[k],  A and x moved by a step by who calls.
//
// Floor: 3 streams of T B H elements forward, 5 for the gradients; of an A that is constant in time, 2 and 3.
//
// Decomposition: a tile is 8 * `steps` steps of a slab, the 32 lanes' channels of one batch row (rows that lie end to
//   end are one): 128 bytes wide, two channels per lane in half types; 256 bytes in fp64. A block of 8 warps does a
//   tile, each warp `steps` of its steps. Blocks take tiles in turn, all slabs of a chunk of time before the next
//   chunk's, so whoever is waited for is running.
//   1. Every warp copies its part into shared memory (cp.async), 16 bytes a lane where addresses allow it. Then it
//      makes the totals of its steps (diagonal_totals.cuh).
//   2. Warp 0 makes the tile's total of them, publishes it, and finds the state before the tile: the nearest earlier
//      state that is published, and the totals of the tiles since, followed in the order of time. So the roundings are
//      those of a walk over all tiles, whichever states were there: the same bits in every run. It publishes the state
//      after the tile, and hands every warp its own.
//   3. Every warp runs through its steps, in shared memory, and writes them, 16 bytes a lane.
// Where a total cannot say what follows a state, the steps themselves do: a warp's are run again one warp after the
//   other, and who follows a tile's total waits for the state after it. By channel, so that none sees its neighbours.
// Shared memory: 2 (3) rows of 128 bytes per step, 64 (96) KB at 32 steps; 3 (2) blocks per SM have 192 KB of reads and
//   writes in flight, where Little's law asks for about 36 at 1 us. Registers: totals, also of a batch of earlier
//   tiles, and a state.
// Cost: per tile and channel 4 words written (7 in fp64) and a few more read, in L2; about 15 instructions per element
//   and 32 lanes, where the memory leaves time for 80. A tile lives for two trips to memory, one or two to L2 and 2 x
//   32 dependent steps, so that what warp 0 does alone in between decides how near the floor few slabs come.
#pragma once
#include <cstdint>

#include "common/cuda/ptx.jit.cuh"
#include "common/element.cuh"
#include "scan/cuda/chunk_status.cuh"
#include "scan/cuda/diagonal_totals.cuh"
#include "scan/linear_scan_args.h"

namespace weft::scan {

constexpr int kTileWarps = 8, kTileThreads = 32 * kTileWarps;

template <typename T>
struct TileShape {
  static constexpr int kChannels = sizeof(T) < 4 ? 4 / int(sizeof(T)) : 1;  // of a lane
  static constexpr int kWidth = 32 * kChannels;
  static constexpr int kLaneBytes = kChannels * int(sizeof(T));
  static constexpr int kRowBytes = 32 * kLaneBytes;
  // Words that a tile leaves for others, per channel: its total, and the state after it.
  static constexpr int kTotalWords = Total<State<T>>::kWords, kWords = kTotalWords + 1;
};

// The problem, cut.
struct Tiles {
  DiagonalGradients problem;  // forward: `scan` alone
  int64_t slabs_per_row, slabs, chunks;
  int steps;                    // of a warp
  bool pieces;                  // addresses, strides and H are multiples of 16 bytes
  unsigned long long* counter;  // null: one chunk, whose tiles are the blocks
  uint32_t* status;             // (chunks, slabs), zero
  double* words;                // (chunks, slabs, channels of a lane, kWords, 32)
  void* sums;                   // (chunks, B, H) in the dtype of the state: what each adds to a summed gradient of A
};

template <typename T>
struct alignas(16) TileShared {
  using Shape = TileShape<T>;
  double totals[kTileWarps][Shape::kChannels][Shape::kTotalWords][32];  // of every warp's steps
  State<T> starts[kTileWarps + 1][Shape::kChannels][32];
  int64_t next;
  bool again;
};

template <typename T>
constexpr int64_t tile_shared_bytes(int steps, bool gradients) {
  return int64_t(gradients ? 3 : 2) * kTileWarps * steps * TileShape<T>::kRowBytes + int64_t(sizeof(TileShared<T>));
}

// One tile, as one warp sees it.
template <typename T, bool kGradients>
class Tile {
  using S = TileShape<T>;
  using Acc = State<T>;
  static constexpr int kChannels = S::kChannels, kRowBytes = S::kRowBytes, kPieces = kRowBytes / 16;

 public:
  __device__ Tile(const Tiles& tiles, int64_t index, unsigned char* memory)
      : tiles_(tiles),
        scan_(tiles.problem.scan),
        shared_(*reinterpret_cast<TileShared<T>*>(memory)),
        warp_(int(threadIdx.x) / 32),
        lane_(int(threadIdx.x) % 32) {
    chunk_ = index / tiles.slabs;
    slab_ = index % tiles.slabs;
    row_ = slab_ / tiles.slabs_per_row;
    h0_ = slab_ % tiles.slabs_per_row * S::kWidth;
    const int64_t left = scan_.T - chunk_ * kTileWarps * tiles.steps;
    active_ = int(min(int64_t(kTileWarps), (left + tiles.steps - 1) / tiles.steps));
    first_ = (chunk_ * kTileWarps + warp_) * tiles.steps;
    count_ = int(max(int64_t(0), min(int64_t(tiles.steps), scan_.T - first_)));
    owned_ = int(max(int64_t(0), min(int64_t(kChannels), scan_.H - h0_ - lane_ * kChannels)));
    const int part = tiles.steps * kRowBytes;
    A_ = memory + sizeof(TileShared<T>) + (kGradients ? 3 : 2) * part * warp_;
    b_ = A_ + part;
    x_ = b_ + part;
  }

  // Starts the copies of the warp's rows.
  __device__ void fetch() {
    const int skip = first_ == 0 && scan_.x0 == nullptr ? 1 : 0;  // no A before the first step: zero, which leaves b
    fetch_rows(A_, element(scan_.A, row_ * scan_.A_b), scan_.A_t, 0, skip, false);
    fetch_rows(A_, element(scan_.A, row_ * scan_.A_b), scan_.A_t, skip, count_, true);
    fetch_rows(b_, element(scan_.b, row_ * scan_.b_b), scan_.b_t, 0, count_, true);
    if constexpr (kGradients) {
      const DiagonalGradients& g = tiles_.problem;
      if (g.x != nullptr) {
        // Before the last step of processing there was x0.
        const int usual = first_ + count_ == scan_.T && count_ > 0 ? count_ - 1 : count_;
        fetch_rows(x_, element(g.x, row_ * g.x_b), g.x_t, 0, usual, true);
        fetch_rows(x_, element(g.x0, row_ * g.x0_b), 0, usual, count_, g.x0 != nullptr);
      }
    }
    copy_commit();
  }

  __device__ void make_totals() {
    copy_wait<0>();
    __syncwarp();
    Total<Acc> total[kChannels];
    for (int i = 0; i < count_; i += kFactorsPerNormalise) {
#pragma unroll
      for (int j = 0; j < kFactorsPerNormalise; ++j) {
        if (i + j < count_) {
          const Lane a = read(A_, i + j), b = read(b_, i + j);
#pragma unroll
          for (int c = 0; c < kChannels; ++c) total[c].step(to_state(a.of[c]), to_state(b.of[c]));
        }
      }
#pragma unroll
      for (int c = 0; c < kChannels; ++c) total[c].normalise();
    }
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      total[c].each_word([&](int i, double& word) { shared_.totals[warp_][c][i][lane_] = word; });
    }
  }

  // Warp 0 alone.
  __device__ void find_starts() {
    const bool last = chunk_ + 1 == tiles_.chunks;
    Acc x[kChannels], after[kChannels];
    Total<Acc> all[kChannels];
    if (!last) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        all[c] = tile_total(c);
        all[c].each_word([&](int i, double& word) { put_word(words(chunk_, c) + 32 * i, word); });
      }
      __syncwarp();
      if (lane_ == 0 && chunk_ > 0) publish_status(status(chunk_), kTotal);
    }
    find_state(x);
    // By the total, as everyone does who follows it.
    bool known = !last;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      after[c] = x[c];
      if (!last) known &= all[c].follow(tile_roundings(), after[c]);
    }
    const bool all_known = !__any_sync(~0u, !known);
    if (all_known) publish_state(after);
    bool again = false;
    const int ends = all_known || last ? active_ - 1 : active_;  // that somebody starts from
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      shared_.starts[0][c][lane_] = x[c];
      for (int w = 0; w < ends; ++w) {
        again |= !warp_total(w, c).follow(warp_roundings(), x[c]);
        shared_.starts[w + 1][c][lane_] = x[c];
      }
    }
    again = __any_sync(~0u, again);
    if (lane_ == 0) shared_.again = again;
    if (!again && !all_known && !last) publish_end();
  }

  __device__ bool again() const {
    return shared_.again;
  }

  // All warps, in turn, each from the state that the one before it has ended with.
  __device__ void find_starts_again() {
    for (int w = 0; w < active_; ++w) {
      if (w == warp_) {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          Acc x = shared_.starts[w][c][lane_];
          if (!warp_total(w, c).follow(warp_roundings(), x)) {
            for (int i = 0; i < count_; ++i) {
              x = fused(to_state(read(A_, i).of[c]), x, to_state(read(b_, i).of[c]));
            }
          }
          shared_.starts[w + 1][c][lane_] = x;
        }
      }
      __syncthreads();
    }
    if (warp_ == 0 && chunk_ + 1 < tiles_.chunks) publish_end();
    __syncthreads();  // until then the totals are not overwritten
  }

  // Runs through the warp's steps and writes them.
  __device__ void replay() {
    const DiagonalGradients& g = tiles_.problem;
    Acc x[kChannels], sum[kChannels];
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      x[c] = shared_.starts[warp_][c][lane_];
      sum[c] = 0;
    }
#pragma unroll 4
    for (int i = 0; i < count_; ++i) {
      const Lane a = read(A_, i);
      Lane b = read(b_, i);
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        x[c] = fused(to_state(a.of[c]), x[c], to_state(b.of[c]));
        b.of[c] = from_state<T>(x[c]);
      }
      write(b_, i, b);
      if constexpr (kGradients) {
        if (g.x != nullptr) {
          Lane previous = read(x_, i);
          // Without x0 the gradient is zero, also where lambda is not finite.
          const bool none = g.x0 == nullptr && first_ + i + 1 == scan_.T;
#pragma unroll
          for (int c = 0; c < kChannels; ++c) {
            const Acc product = none ? Acc(0) : x[c] * to_state(previous.of[c]);
            sum[c] += product;
            previous.of[c] = from_state<T>(product);
          }
          write(x_, i, previous);
        }
      }
    }
    __syncwarp();
    if (scan_.out != nullptr) store_rows(b_, scan_.out, row_ * scan_.out_b, scan_.out_t);
    if constexpr (kGradients) {
      if (g.grad_A != nullptr && !g.summed) store_rows(x_, g.grad_A, row_ * g.grad_A_b, g.grad_A_t);
      if (g.summed) {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) shared_.totals[warp_][c][0][lane_] = sum[c];
      }
      if (g.grad_x0 != nullptr && count_ > 0 && first_ + count_ == scan_.T) {
        const int64_t h = h0_ + lane_ * kChannels;
        const T* const A = element(scan_.A, row_ * scan_.A_b + scan_.T * scan_.A_t) + lane_ * kChannels;
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          if (c >= owned_) continue;
          const Acc product = to_state(A[c]) * x[c];
          if (g.wide_x0) {
            static_cast<Acc*>(g.grad_x0)[row_ * scan_.H + h + c] = product;
          } else {
            static_cast<T*>(g.grad_x0)[row_ * scan_.H + h + c] = from_state<T>(product);
          }
        }
      }
    }
    __syncwarp();  // before the next tile's rows come in
  }

  // Warp 0 alone, when all warps have run through their steps.
  __device__ void store_sums() {
    Acc* const to = static_cast<Acc*>(tiles_.sums) + (chunk_ * scan_.B + row_) * scan_.H + h0_ + lane_ * kChannels;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      double sum = 0;
      for (int w = 0; w < active_; ++w) sum += shared_.totals[w][c][0][lane_];
      if (c < owned_) to[c] = Acc(sum);
    }
  }

 private:
  // What a lane has of a row.
  struct alignas(S::kLaneBytes) Lane {
    T of[kChannels];
  };
  __device__ Lane read(const unsigned char* rows, int i) const {
    return *reinterpret_cast<const Lane*>(rows + i * kRowBytes + lane_ * S::kLaneBytes);
  }
  __device__ void write(unsigned char* rows, int i, const Lane& value) const {
    *reinterpret_cast<Lane*>(rows + i * kRowBytes + lane_ * S::kLaneBytes) = value;
  }

  __device__ static float fused(float a, float x, float b) {
    return fmaf(a, x, b);
  }
  __device__ static double fused(double a, double x, double b) {
    return fma(a, x, b);
  }

  // The slab's first channel, `offset` elements into a tensor.
  __device__ const T* element(const void* base, int64_t offset) const {
    return static_cast<const T*>(base) + offset + h0_;
  }
  // Whether piece `piece` of a row lies within H. It does or it does not: H is a multiple of 16 bytes, too.
  __device__ bool inside(int piece) const {
    return h0_ * int64_t(sizeof(T)) + piece * 16 < scan_.H * int64_t(sizeof(T));
  }

  // Rows [begin, end) of the warp's, row 0 being step first_; zeros where there is nothing, and beyond H.
  __device__ void fetch_rows(unsigned char* to, const T* from, int64_t stride, int begin, int end, bool exist) const {
    if (tiles_.pieces) {
      const int piece = lane_ % kPieces;
      const int bytes = exist && inside(piece) ? 16 : 0;
      for (int i = begin + lane_ / kPieces; i < end; i += 32 / kPieces) {
        const char* const at = reinterpret_cast<const char*>(from + (first_ + i) * stride) + piece * 16;
        copy_async_padded(to + i * kRowBytes + piece * 16, bytes ? at : static_cast<const char*>(scan_.b), bytes);
      }
      return;
    }
    for (int i = begin; i < end; ++i) {
      const T* const at = from + (first_ + i) * stride + lane_ * kChannels;
      if constexpr (sizeof(T) >= 4) {
        T* const place = reinterpret_cast<T*>(to + i * kRowBytes) + lane_;
        if (exist && owned_) {
          copy_async<int(sizeof(T))>(place, at);
        } else {
          *place = T(0);
        }
      } else {  // cp.async has no 2-byte form
        Lane value{};
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          if (exist && c < owned_) value.of[c] = at[c];
        }
        write(to, i, value);
      }
    }
  }

  __device__ void store_rows(const unsigned char* rows, void* base, int64_t offset, int64_t stride) const {
    T* const to = static_cast<T*>(base) + offset + h0_ + first_ * stride;
    if (tiles_.pieces) {
      const int piece = lane_ % kPieces;
      if (!inside(piece)) return;
      for (int i = lane_ / kPieces; i < count_; i += 32 / kPieces) {
        *reinterpret_cast<uint4*>(reinterpret_cast<char*>(to + i * stride) + piece * 16) =
            *reinterpret_cast<const uint4*>(rows + i * kRowBytes + piece * 16);
      }
      return;
    }
    for (int i = 0; i < count_; ++i) {
      const Lane value = read(rows, i);
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        if (c < owned_) to[i * stride + lane_ * kChannels + c] = value.of[c];
      }
    }
  }

  // Roundings of a term on its way through so many steps, totals and a state.
  __device__ double warp_roundings() const {
    return tiles_.steps + 2;
  }
  __device__ double tile_roundings() const {
    return kTileWarps * tiles_.steps + 2 * kTileWarps + 2;
  }

  __device__ uint32_t* status(int64_t chunk) const {
    return tiles_.status + chunk * tiles_.slabs + slab_;
  }
  __device__ double* words(int64_t chunk, int c) const {
    return tiles_.words + ((chunk * tiles_.slabs + slab_) * kChannels + c) * S::kWords * 32 + lane_;
  }
  __device__ double* state_word(int64_t chunk, int c) const {
    return words(chunk, c) + 32 * S::kTotalWords;
  }

  __device__ Total<Acc> warp_total(int warp, int c) const {
    Total<Acc> total;
    total.each_word([&](int i, double& word) { word = shared_.totals[warp][c][i][lane_]; });
    return total;
  }
  __device__ Total<Acc> tile_total(int c) const {
    Total<Acc> total = warp_total(0, c);
    for (int w = 1; w < active_; ++w) total.then(warp_total(w, c));
    return total;
  }

  // The state before the tile.
  __device__ void find_state(Acc (&x)[kChannels]) const {
    if (chunk_ == 0) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        x[c] = scan_.x0 != nullptr && c < owned_ ? to_state(element(scan_.x0, row_ * scan_.x0_b)[lane_ * kChannels + c])
                                                 : Acc(0);
      }
      return;
    }
    // Lane i looks at the i-th tile before this one.
    int nearest;
    for (bool found = false; !found;) {
      const int64_t looked_at = chunk_ - 1 - lane_;
      const uint32_t seen = looked_at >= 0 ? look_at_status(status(looked_at)) : 0;
      const unsigned states = __ballot_sync(~0u, seen == kState), any = __ballot_sync(~0u, seen != 0);
      nearest = __ffs(int(states)) - 1;
      found = states != 0 && (((1u << nearest) - 1) & ~any) == 0;
    }
    __syncwarp();
    get_state(chunk_ - 1 - nearest, x);
    // Totals in batches, so that one trip to L2 serves many.
    constexpr int kBatch = (sizeof(T) == 8 ? 2 : 4) / kChannels;
    for (int64_t first = chunk_ - nearest; first < chunk_; first += kBatch) {
      Total<Acc> totals[kBatch][kChannels];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + i >= chunk_) continue;
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          totals[i][c].each_word([&](int j, double& word) { word = get_word(words(first + i, c) + 32 * j); });
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int64_t k = first + i;
        if (k >= chunk_) continue;
        bool known = true;
#pragma unroll
        for (int c = 0; c < kChannels; ++c) known &= totals[i][c].follow(tile_roundings(), x[c]);
        if (__any_sync(~0u, !known)) {
          while (__any_sync(~0u, look_at_status(status(k)) != kState)) {
          }
          __syncwarp();
          get_state(k, x);
        }
      }
    }
  }

  __device__ void get_state(int64_t chunk, Acc (&x)[kChannels]) const {
#pragma unroll
    for (int c = 0; c < kChannels; ++c) x[c] = Acc(get_word(state_word(chunk, c)));
  }
  __device__ void publish_state(const Acc (&x)[kChannels]) const {
#pragma unroll
    for (int c = 0; c < kChannels; ++c) put_word(state_word(chunk_, c), double(x[c]));
    __syncwarp();
    if (lane_ == 0) publish_status(status(chunk_), kState);
  }
  // The state after the last warp's steps, but where the total has said it.
  __device__ void publish_end() const {
    Acc x[kChannels];
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      x[c] = shared_.starts[active_][c][lane_];
      Acc after = shared_.starts[0][c][lane_];
      if (tile_total(c).follow(tile_roundings(), after)) x[c] = after;
    }
    publish_state(x);
  }

  const Tiles& tiles_;
  const LinearScan& scan_;
  TileShared<T>& shared_;
  const int warp_, lane_;
  int64_t chunk_, slab_, row_, h0_;
  int active_;     // warps of the tile that have steps
  int64_t first_;  // step of the warp
  int count_;      // its steps
  int owned_;      // channels of the lane
  unsigned char *A_, *b_, *x_;
};

template <typename T, bool kGradients>
__device__ void run_tiles(const Tiles& tiles, unsigned char* memory) {
  auto& shared = *reinterpret_cast<TileShared<T>*>(memory);
  const int64_t count = tiles.slabs * tiles.chunks;
  int64_t index = blockIdx.x;
  if (tiles.counter != nullptr) {
    if (threadIdx.x == 0) shared.next = take_tile(tiles.counter);
    __syncthreads();
    index = shared.next;
    __syncthreads();
  }
  while (index < count) {
    Tile<T, kGradients> tile(tiles, index, memory);
    tile.fetch();
    if (threadIdx.x == 0) shared.next = tiles.counter != nullptr ? take_tile(tiles.counter) : count;
    tile.make_totals();
    __syncthreads();  // the totals of all warps, and the next tile
    index = shared.next;
    if (threadIdx.x < 32) tile.find_starts();
    __syncthreads();  // the starts of all warps
    if (tile.again()) tile.find_starts_again();
    tile.replay();
    if (kGradients && tiles.problem.summed) {
      __syncthreads();
      if (threadIdx.x < 32) tile.store_sums();
      __syncthreads();
    }
  }
}

}  // namespace weft::scan
