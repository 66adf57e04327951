// x[t] = A[t] * x[t-1] + b[t], A diagonal, and its gradients, in one pass over memory for any shape. B * H independent
// channels; the order of processing is that of linear_scan_args.h, so that gradients are a scan, too:
//   lambda[k] = A[k] lambda[k-1] + grad[k],  grad_A[k] = lambda[k] x[k],  A and x moved by a step by who calls.
//
// Floor: 3 streams of T B H elements forward, 5 for the gradients; of an A that is constant in time, 2 and 3.
//
// Decomposition: a slab is kWidth adjacent channels of one batch row (rows that lie end to end are one), and a tile is
//   kTileStrands * `steps` steps of it. A strand is `steps` steps; a warp has kStrands of them, each kLanes lanes wide.
//   Rows of 64 bytes are as narrow as the memory likes them: the narrower a slab, the longer a tile, and the fewer of
//   them follow each other. A block has 8 warps that read, 8 that write and a finder. Blocks take tiles in turn, all
//   slabs of a chunk of time before the next chunk's, so whoever is waited for is running.
// Pipeline: between two barriers a block works on four tiles, which it has taken one after the other, so that neither
//   reading nor writing waits for a state.
//   1. The readers start copying the newest into shared memory (cp.async), 16 bytes a lane where addresses allow it.
//   2. Of the one before, which has arrived, they make the total of every strand (diagonal_totals.cuh), and of those
//      that of the tile, which they publish.
//   3. The finder finds the state before the tile before that: the nearest earlier state that is published, and the
//      totals of the tiles since, followed in the order of time. So the roundings are those of a walk over all tiles,
//      whichever states were there: the same bits in every run. It publishes the state after the tile, and gives every
//      strand its own.
//   4. The writers run through the strands of the oldest, in shared memory, and write them, 16 bytes a lane.
//   Where the copy engine reads, no role waits for another but for the tile itself (run_tiles_by_engine): a finder that
//   waits for other blocks then holds up neither the totals that others wait for nor the memory.
// Where a total cannot say what follows a state, the steps themselves do: the finder runs the tile's strands one after
//   the other, and who follows a tile's total waits for the state after it. By channel, so that none sees its
//   neighbours.
// Shared memory: kSlots tiles (kEngineSlots where the copy engine reads), 2 (3) rows of 64 bytes per step, all that a
//   block may have; one tile of it is on its way, where Little's law asks for about 36 KB at 1 us; and two tiles'
//   totals and states. Registers: totals, also of a batch of earlier tiles, and a state.
// Cost: per tile and channel 4 words written (7 in fp64) and a few more read, in L2, each of which says by itself that
//   it is there. A tile has to be done, in the mean, while the memory moves as many bytes: on an H200 in 2.4 us. Every
//   role has so long: the readers are bound by the latency of their totals in fp64, the finder by two trips to L2.
#pragma once
#include <cstdint>

#include "common/cuda/boxes.cuh"
#include "common/cuda/ptx.jit.cuh"
#include "scan/linear/cuda/chunk_status.cuh"
#include "scan/linear/cuda/diagonal_totals.cuh"
#include "scan/linear/cuda/state.cuh"
#include "scan/linear/linear_scan_args.h"

namespace weft::scan {

constexpr int kTileWarps = 8;  // that read, and that write
constexpr int kTileThreads = 32 * (2 * kTileWarps + 1);
constexpr int kSlots = 4;  // for tiles: one comes in, one gets its totals, one its states, one is run through
// Where the copy engine reads, no role waits for all of them, and fewer and longer tiles take less time; not so of half
// types, whose strands are long as it is.
template <typename T>
constexpr int kEngineSlots = sizeof(T) == 4 || kComplex<T> ? 3 : 4;

template <typename T>
struct TileShape {
  // A lane has a channel: with two of a half type, as a bank of shared memory has them, a tile takes half as long
  // again.
  static constexpr int kRowBytes = 64, kLanes = kRowBytes / int(sizeof(T)), kWidth = kLanes;
  static constexpr int kStrands = 32 / kLanes, kTileStrands = kTileWarps * kStrands;
  // Words that a tile leaves for others, per channel: its total, and the state after it.
  static constexpr int kTotalWords = Total<state_t<T>>::kWords, kWords = kTotalWords + 1;
  // Steps that the copy engine takes: it lays rows after each other from addresses that are multiples of 128, and the
  // strands of a warp lie in different banks.
  static constexpr int engine_steps(int most) {
    return kStrands > 1 ? (most - 1) | 1 : most - most % (128 / kRowBytes);
  }
  // Rows from strand to strand, so that the strands of a warp lie in different banks.
  static constexpr int stride(int steps) {
    constexpr int kRows = 128 / kRowBytes;  // that all banks hold
    return steps + (kRows + 1 - steps % kRows) % kRows;
  }
};

// The problem, cut.
struct Tiles {
  DiagonalGradients problem;  // forward: `scan` alone
  int64_t slabs_per_row, slabs, chunks;
  int steps;                    // of a strand
  int slots;                    // kSlots, kEngineSlots or one
  bool pieces;                  // addresses, strides and H are multiples of 16 bytes
  unsigned long long* counter;  // zero; null: one chunk, and a block for each of its tiles
  uint32_t* status;             // (slabs, chunks), zero; of several chunks alone, as words
  uint64_t* words;              // (chunks, slabs, kWords, kLanes), zero
  void* sums;                   // (chunks, B, H) in the dtype of the state: what each adds to a summed gradient of A
  // For the copy engine: (H, T, B) of each tensor, of the steps that may be read; boxes are a warp's rows.
  bool turned;    // addresses fall from step to step
  int A_skipped;  // steps before the map of A begins
  TensorMap A_map, b_map, x_map;
};

// Where a tile is.
struct Place {
  int64_t chunk, slab, row, h0;  // h0: the slab's first channel
  bool exists;
};

template <typename T>
struct alignas(128) TileShared {
  using Shape = TileShape<T>;
  uint64_t come[kEngineSlots<T>][kTileWarps];  // barriers: the rows of a warp
  static constexpr int kPlaces = 8;
  // Of every strand's steps, then of the steps before it in the 8 strands that a lane of the finder takes.
  double totals[2][Shape::kTileStrands][Shape::kTotalWords][Shape::kLanes];
  double groups[2][Shape::kStrands][Shape::kTotalWords][Shape::kLanes];  // of each 8 strands
  state_t<T> starts[2][Shape::kTileStrands][Shape::kLanes];              // then sums for a summed gradient of A
  Place places[kPlaces];
};

template <typename T>
constexpr int64_t tile_shared_bytes(int steps, bool gradients, int slots, bool engine) {
  using S = TileShape<T>;
  return int64_t(slots) * (gradients ? 3 : 2) * S::kTileStrands * (engine ? steps : S::stride(steps)) * S::kRowBytes +
         int64_t(sizeof(TileShared<T>));
}

// The `number`-th tile of a block, as one warp sees it.
template <typename T, bool kGradients, bool kEngine>
class Tile {
  using S = TileShape<T>;
  using Acc = state_t<T>;
  static constexpr int kRowBytes = S::kRowBytes, kPieces = kRowBytes / 16;
  static constexpr int kLanes = S::kLanes, kStrands = S::kStrands;
  static constexpr unsigned kOwnSlots = kEngine ? kEngineSlots<T> : kSlots;

 public:
  __device__ Tile(const Tiles& tiles, unsigned number, unsigned char* memory)
      : tiles_(tiles),
        scan_(tiles.problem.scan),
        shared_(*reinterpret_cast<TileShared<T>*>(memory)),
        place_(shared_.places[number % TileShared<T>::kPlaces]),
        half_(int(number % 2)),
        warp_(int(threadIdx.x) / 32 % kTileWarps),
        lane_(int(threadIdx.x) % 32 % kLanes),
        strand_(int(threadIdx.x) % 32 / kLanes),
        number_(number) {
    const int rows = between() * S::kTileStrands;
    const unsigned slot = tiles.slots == 1 ? 0 : number % kOwnSlots;
    A_ = memory + sizeof(TileShared<T>) + slot * (kGradients ? 3 : 2) * rows * kRowBytes;
    row_bytes_ = kEngine && tiles.turned ? -kRowBytes : kRowBytes;
    first_at_ = (row_bytes_ < 0 ? (rows - 1) * kRowBytes : 0) + lane_ * int(sizeof(T));
    b_ = A_ + rows * kRowBytes;
    x_ = b_ + rows * kRowBytes;
    begin_ = place_.chunk * S::kTileStrands * tiles.steps;
    first_ = begin_ + warp_ * kStrands * tiles.steps;
    count_ = within(first_, kStrands * tiles.steps);
    owned_ = place_.h0 + lane_ < scan_.H;
  }

  // Starts the copies of the warp's strands.
  __device__ void fetch() {
    const int skip = first_ == 0 && scan_.x0 == nullptr ? 1 : 0;  // no A before the first step: zero, which leaves b
    fetch_rows(A_, element(scan_.A, place_.row * scan_.A_b), scan_.A_t, 0, skip, false);
    fetch_rows(A_, element(scan_.A, place_.row * scan_.A_b), scan_.A_t, skip, count_, true);
    fetch_rows(b_, element(scan_.b, place_.row * scan_.b_b), scan_.b_t, 0, count_, true);
    if constexpr (kGradients) {
      const DiagonalGradients& g = tiles_.problem;
      if (g.x != nullptr) {
        // Before the last step of processing there was x0.
        const int usual = first_ + count_ == scan_.T && count_ > 0 ? count_ - 1 : count_;
        fetch_rows(x_, element(g.x, place_.row * g.x_b), g.x_t, 0, usual, true);
        fetch_rows(x_, element(g.x0, place_.row * g.x0_b), 0, usual, count_, g.x0 != nullptr);
      }
    }
  }

  // The same by the copy engine, which writes zeros where there is nothing. One lane.
  __device__ void fetch_boxes() const {
    const u32 barrier = come(shared_, number_);
    const int bytes = kStrands * tiles_.steps * kRowBytes, rows = kGradients && tiles_.problem.x != nullptr ? 3 : 2;
    mbarrier_expect(barrier, u32(rows * bytes));
    const int64_t end = scan_.T - first_ - kStrands * tiles_.steps;  // steps after the warp's
    fetch_box(A_, tiles_.A_map, tiles_.turned ? end : first_ - tiles_.A_skipped, barrier);
    fetch_box(b_, tiles_.b_map, tiles_.turned ? end : first_, barrier);
    if (rows == 3) fetch_box(x_, tiles_.x_map, tiles_.turned ? end - 1 : first_, barrier);
  }
  // One lane, of a tile that is not there: who waits for it finds that out.
  __device__ void fetch_nothing() const { mbarrier_expect(come(shared_, number_), 0); }
  // All lanes. Who asked for the rows knew the tile's place: none reads it before.
  __device__ static void wait_for_boxes(TileShared<T>& shared, unsigned number) {
    mbarrier_wait(come(shared, number), number / kOwnSlots % 2);
  }
  // What no box has. All lanes.
  __device__ void complete_boxes() const {
    if constexpr (kGradients) {
      // Before the last step of processing there was x0.
      const DiagonalGradients& g = tiles_.problem;
      const int strand = warp_ * kStrands + strand_, count = strand_steps(strand);
      if (g.x != nullptr && g.x0 != nullptr && owned_ && count > 0 &&
          begin_ + strand * tiles_.steps + count == scan_.T) {
        write(x_, strand, count - 1, element(g.x0, place_.row * g.x0_b)[lane_]);
      }
    }
    __syncwarp();
  }
  __device__ void make_totals() {
    const int strand = warp_ * kStrands + strand_, count = strand_steps(strand);
    Total<Acc> total;
    auto steps = [&](int i, auto some) {
      constexpr int kSome = decltype(some)::value;
      T a[kSome], b[kSome];
#pragma unroll
      for (int j = 0; j < kSome; ++j) a[j] = read(A_, strand, i + j), b[j] = read(b_, strand, i + j);
#pragma unroll
      for (int j = 0; j < kSome; ++j) {
        total.step(factor<kGradients>(to_state(a[j])), to_state(b[j]));
        if (j % kFactorsPerNormalise == kFactorsPerNormalise - 1 || j == kSome - 1) total.normalise();
      }
    };
    int i = 0;
    for (; i + 8 <= count; i += 8) steps(i, std::integral_constant<int, 8>{});
    for (; i < count; ++i) steps(i, std::integral_constant<int, 1>{});
    keep(shared_.totals[half_][strand], total);
  }

  // One warp, when those of all strands are made.
  __device__ void publish_total() {
    const bool last = place_.chunk + 1 == tiles_.chunks;
    add_totals();
    if (!last && strand_ == 0) {
      Total<Acc> all = kept(shared_.groups[half_][0]);
      for (int i = 1; i < kStrands; ++i) all.then(kept(shared_.groups[half_][i]));
      all.each_word([&](int i, double& word) { put_word(words(place_.chunk) + kLanes * i, word); });
    }
    if (!last && place_.chunk > 0) put_status(kTotal);
  }

  // The finder alone. `wait`: until the starts of the tile two before are not needed any more.
  template <typename F>
  __device__ void find_starts(const F& wait) {
    const bool last = place_.chunk + 1 == tiles_.chunks;
    const Group group = group_totals();
    Acc before, after;
    find_state(before);
    // By the total, as everyone does who follows it.
    bool known = true;
    after = before;
    if (!last) known &= group.all.follow(roundings(), after);
    const bool all_known = !__any_sync(~0u, !known);
    if (all_known && !last) publish_state(after);
    wait();
    const bool again = !give_starts(group, before);
    if (__any_sync(~0u, again || !all_known)) {
      __syncwarp();
      run_again(group, before, after);
      if (!all_known) publish_state(after);
    }
  }

  // Runs through the warp's strands and writes them.
  __device__ void replay() {
    const DiagonalGradients& g = tiles_.problem;
    const int strand = warp_ * kStrands + strand_, count = strand_steps(strand);
    const int64_t first = begin_ + strand * tiles_.steps;
    Acc x = shared_.starts[half_][strand][lane_], sum{};
    const bool products = kGradients && g.x != nullptr;
    auto steps = [&](int i, auto some) {
      constexpr int kSome = decltype(some)::value;
      T a[kSome], b[kSome], previous[kSome];
#pragma unroll
      for (int j = 0; j < kSome; ++j) {
        a[j] = read(A_, strand, i + j);
        b[j] = read(b_, strand, i + j);
        if (products) previous[j] = read(x_, strand, i + j);
      }
#pragma unroll
      for (int j = 0; j < kSome; ++j) {
        x = fused(factor<kGradients>(to_state(a[j])), x, to_state(b[j]));
        b[j] = to_element<T>(x);
        write(b_, strand, i + j, b[j]);
        if (products) {
          // Without x0 the gradient is zero, also where lambda is not finite.
          const bool none = g.x0 == nullptr && first + i + j + 1 == scan_.T;
          const Acc product = none ? Acc{} : times(x, conjugate(to_state(previous[j])));
          sum += product;
          previous[j] = to_element<T>(product);
          write(x_, strand, i + j, previous[j]);
        }
      }
    };
    int i = 0;
    for (; i + 4 <= count; i += 4) steps(i, std::integral_constant<int, 4>{});
    for (; i < count; ++i) steps(i, std::integral_constant<int, 1>{});
    __syncwarp();
    if (scan_.out != nullptr) store_rows(b_, scan_.out, place_.row * scan_.out_b, scan_.out_t);
    if constexpr (kGradients) {
      if (g.grad_A != nullptr && !g.summed) store_rows(x_, g.grad_A, place_.row * g.grad_A_b, g.grad_A_t);
      if (g.summed) shared_.starts[half_][strand][lane_] = sum;
      if (g.grad_x0 != nullptr && count > 0 && first + count == scan_.T && owned_) {
        const int64_t at = place_.row * scan_.H + place_.h0 + lane_;
        const T* const A = element(scan_.A, place_.row * scan_.A_b + scan_.T * scan_.A_t) + lane_;
        const Acc product = times(conjugate(to_state(*A)), x);
        if (g.wide_x0) {
          static_cast<Acc*>(g.grad_x0)[at] = product;
        } else {
          static_cast<T*>(g.grad_x0)[at] = to_element<T>(product);
        }
      }
    }
    if constexpr (kEngine) fence_copy_engine();
    __syncwarp();  // before the next tile's rows come in
  }

  // The finder alone, when all warps have run through their strands.
  __device__ void store_sums() {
    Acc* const to = static_cast<Acc*>(tiles_.sums) + (place_.chunk * scan_.B + place_.row) * scan_.H + place_.h0;
    sum_t<Acc> sum{};
    for (int strand = 0; strand < S::kTileStrands; ++strand) sum += shared_.starts[half_][strand][lane_];
    if (owned_ && strand_ == 0) to[lane_] = rounded<Acc>(sum);
    __syncwarp();  // before they are starts again
  }

 private:
  // Rows from strand to strand.
  __device__ int between() const {
    return kEngine ? tiles_.steps : S::stride(tiles_.steps);
  }
  __device__ int at(int strand, int i) const {
    return first_at_ + (strand * between() + i) * row_bytes_;
  }
  // The warp's rows.
  __device__ int box() const {
    const int rows = kStrands * tiles_.steps;
    return (tiles_.turned ? kTileWarps - 1 - warp_ : warp_) * rows * kRowBytes;
  }
  __device__ static u32 come(TileShared<T>& shared, unsigned number) {
    return shared_address(&shared.come[number % kOwnSlots][threadIdx.x / 32 % kTileWarps]);
  }
  __device__ void fetch_box(unsigned char* to, const TensorMap& map, int64_t row, u32 barrier) const {
    copy_box(shared_address(to + box()), map, int(place_.h0), int(row), int(place_.row), barrier);
  }
  __device__ T read(const unsigned char* rows, int strand, int i) const {
    return *reinterpret_cast<const T*>(rows + at(strand, i));
  }
  __device__ void write(unsigned char* rows, int strand, int i, const T& value) const {
    *reinterpret_cast<T*>(rows + at(strand, i)) = value;
  }

  // How many of `most` steps from `first` there are.
  __device__ int within(int64_t first, int most) const {
    return int(max(int64_t(0), min(int64_t(most), scan_.T - first)));
  }
  __device__ int strand_steps(int strand) const {
    return within(begin_ + strand * tiles_.steps, tiles_.steps);
  }

  // The slab's first channel, `offset` elements into a tensor.
  __device__ const T* element(const void* base, int64_t offset) const {
    return static_cast<const T*>(base) + offset + place_.h0;
  }
  // Whether piece `piece` of a row lies within H. It does or it does not: H is a multiple of 16 bytes, too.
  __device__ bool inside(int piece) const {
    return place_.h0 * int64_t(sizeof(T)) + piece * 16 < scan_.H * int64_t(sizeof(T));
  }
  // Bytes from the tile's first row to row i of the warp's strands, which follow each other in time.
  __device__ int row_at(int i) const {
    if constexpr (kEngine) {
      const int row = warp_ * kStrands * tiles_.steps + i;
      return (tiles_.turned ? S::kTileStrands * tiles_.steps - 1 - row : row) * kRowBytes;
    }
    const int pad = S::stride(tiles_.steps) - tiles_.steps;
    int row = warp_ * kStrands * S::stride(tiles_.steps) + i;
#pragma unroll
    for (int strand = 1; strand < kStrands; ++strand) row += i >= strand * tiles_.steps ? pad : 0;
    return row * kRowBytes;
  }

  // Rows [begin, end) of the warp's, row 0 being step first_; zeros where there is nothing, and beyond H.
  __device__ void fetch_rows(unsigned char* to, const T* from, int64_t stride, int begin, int end, bool exist) const {
    if (tiles_.pieces) {
      const int lane = int(threadIdx.x) % 32, piece = lane % kPieces;
      const int bytes = exist && inside(piece) ? 16 : 0;
      const int first = begin + lane / kPieces;
      const char* at = reinterpret_cast<const char*>(from + (first_ + first) * stride) + piece * 16;
      const int64_t jump = bytes ? 32 / kPieces * stride * int64_t(sizeof(T)) : 0;
      if (bytes == 0) at = static_cast<const char*>(scan_.b);
#pragma unroll 4
      for (int i = first; i < end; i += 32 / kPieces, at += jump) {
        copy_async_padded(to + row_at(i) + piece * 16, at, bytes);
      }
      return;
    }
    const int before = strand_ * tiles_.steps, strand = warp_ * kStrands + strand_;
    for (int i = max(0, begin - before); i < min(tiles_.steps, end - before); ++i) {
      const T* const at = from + (first_ + before + i) * stride + lane_;
      if constexpr (sizeof(T) >= 4) {
        T* const place = reinterpret_cast<T*>(to + this->at(strand, i));
        if (exist && owned_) {
          copy_async<int(sizeof(T))>(place, at);
        } else {
          *place = T{};
        }
      } else {  // cp.async has no 2-byte form
        T value{};
        if (exist && owned_) value = *at;
        write(to, strand, i, value);
      }
    }
  }

  __device__ void store_rows(const unsigned char* rows, void* base, int64_t offset, int64_t stride) const {
    T* const to = static_cast<T*>(base) + offset + place_.h0 + first_ * stride;
    if (tiles_.pieces) {
      const int lane = int(threadIdx.x) % 32, piece = lane % kPieces;
      if (!inside(piece)) return;
      char* at = reinterpret_cast<char*>(to + lane / kPieces * stride) + piece * 16;
      const int64_t jump = 32 / kPieces * stride * int64_t(sizeof(T));
#pragma unroll 4
      for (int i = lane / kPieces; i < count_; i += 32 / kPieces, at += jump) {
        *reinterpret_cast<uint4*>(at) = *reinterpret_cast<const uint4*>(rows + row_at(i) + piece * 16);
      }
      return;
    }
    const int before = strand_ * tiles_.steps, strand = warp_ * kStrands + strand_;
    for (int i = 0; i < strand_steps(strand); ++i) {
      const T value = read(rows, strand, i);
      if (owned_) to[(before + i) * stride + lane_] = value;
    }
  }

  // Roundings of a term on its way through a tile's steps, totals and a state.
  __device__ double roundings() const {
    // A product of pairs rounds a little more than twice what one of numbers does.
    return (kComplex<T> ? 3 : 1) * (S::kTileStrands * tiles_.steps + 2 * S::kTileStrands + 2);
  }

  using Kept = double[S::kTotalWords][kLanes];
  __device__ Total<Acc> kept(const Kept& words) const {
    Total<Acc> total;
    total.each_word([&](int i, double& word) { word = words[i][lane_]; });
    return total;
  }
  __device__ void keep(Kept& words, Total<Acc> total) const {
    total.each_word([&](int i, double& word) { words[i][lane_] = word; });
  }

  // Totals of the tile, and of what is before the 8 strands that the lane takes.
  struct Group {
    Total<Acc> all, before;
  };
  // Makes of the totals of each 8 strands those of the steps before each, and of all.
  __device__ void add_totals() {
    Total<Acc> next[kTileWarps], total;
#pragma unroll
    for (int j = 0; j < kTileWarps; ++j) next[j] = kept(shared_.totals[half_][strand_ * kTileWarps + j]);
#pragma unroll
    for (int j = 0; j < kTileWarps; ++j) {
      keep(shared_.totals[half_][strand_ * kTileWarps + j], total);
      if (j == 0) {
        total = next[j];
      } else {
        total.then(next[j]);
      }
    }
    keep(shared_.groups[half_][strand_], total);
    __syncwarp();
  }
  __device__ Group group_totals() const {
    Group group;
    Total<Acc>& all = group.all;
    for (int i = 0; i < kStrands; ++i) {
      if (i == strand_) group.before = all;
      const Total<Acc> next = kept(shared_.groups[half_][i]);
      if (i == 0) {
        all = next;
      } else {
        all.then(next);
      }
    }
    return group;
  }

  // The state before every strand, by totals; false where they cannot say it of one.
  __device__ bool give_starts(const Group& group, const Acc before) {
    bool known = true;
    Acc x = before, start[kTileWarps];
    if (strand_ > 0) known &= group.before.follow(roundings(), x);
    start[0] = x;
#pragma unroll
    for (int j = 1; j < kTileWarps; ++j) {
      start[j] = x;
      known &= kept(shared_.totals[half_][strand_ * kTileWarps + j]).follow(roundings(), start[j]);
    }
#pragma unroll
    for (int j = 0; j < kTileWarps; ++j) shared_.starts[half_][strand_ * kTileWarps + j][lane_] = start[j];
    return known || begin_ + strand_ * kTileWarps * tiles_.steps >= scan_.T;
  }

  // The same by the steps where totals cannot, one strand after the other. `after`: the state after the tile, by its
  // total where that can say it.
  __device__ void run_again(const Group& group, const Acc before, Acc& after) {
    Acc x = before, group_start = before;
    Total<Acc> groups;
    bool known = true;
    for (int strand = 0; strand < S::kTileStrands; ++strand) {
      const int number = strand / kTileWarps;
      if (strand % kTileWarps == 0 && number > 0) {
        const Total<Acc> next = kept(shared_.groups[half_][number - 1]);
        if (number == 1) {
          groups = next;
        } else {
          groups.then(next);
        }
        group_start = before;
        known = groups.follow(roundings(), group_start);
      }
      Acc start = group_start;
      const bool by_total = strand % kTileWarps == 0 || kept(shared_.totals[half_][strand]).follow(roundings(), start);
      if (known && by_total) x = start;
      shared_.starts[half_][strand][lane_] = x;
      for (int i = 0; i < strand_steps(strand); ++i) {
        x = fused(factor<kGradients>(to_state(read(A_, strand, i))), x, to_state(read(b_, strand, i)));
      }
    }
    after = before;
    if (!group.all.follow(roundings(), after)) after = x;
  }

  __device__ uint32_t* status(int64_t chunk) const {
    return tiles_.status + place_.slab * tiles_.chunks + chunk;
  }
  // A hint that saves others from asking for words: those say by themselves whether they are there.
  __device__ void put_status(uint32_t value) const {
    if (threadIdx.x % 32 == 0) store_word(status(place_.chunk), value);
  }
  __device__ uint64_t* words(int64_t chunk) const {
    return tiles_.words + (chunk * tiles_.slabs + place_.slab) * S::kWords * kLanes + lane_;
  }

  // The state before the tile.
  __device__ void find_state(Acc& x) {
    const int64_t chunk = place_.chunk;
    if (chunk == 0) {
      x = scan_.x0 != nullptr && owned_ ? to_state(element(scan_.x0, place_.row * scan_.x0_b)[lane_]) : Acc{};
      return;
    }
    follow_tiles(chunk, x);
  }
  __device__ void follow_tiles(int64_t chunk, Acc& x) const {
    // Lane i looks at the i-th tile before this one. The state is mostly that of the first or the second, whose words
    // come in the same trip to L2.
    int nearest;
    for (bool found = false; !found;) {
      const int64_t looked_at = chunk - 1 - int(threadIdx.x) % 32;
      const uint32_t seen = looked_at >= 0 ? load_word(status(looked_at)) : 0;
      if (near_state(chunk, x)) return;
      const unsigned states = __ballot_sync(~0u, seen == kState), any = __ballot_sync(~0u, seen != 0);
      nearest = __ffs(int(states)) - 1;
      found = states != 0 && (((1u << nearest) - 1) & ~any) == 0;
    }
    const int64_t known = chunk - 1 - nearest;
    const uint64_t state = load_word(state_word(known));
    // Totals in batches, so that one trip to L2 serves many, the first of them with the state.
    constexpr int kBatch = sizeof(T) == 8 ? 2 : 4;
    for (int64_t first = known + 1;; first += kBatch) {
      uint64_t seen[kBatch][S::kTotalWords];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
#pragma unroll
        for (int j = 0; j < S::kTotalWords; ++j) {
          seen[i][j] = first + i < chunk ? load_word(words(first + i) + kLanes * j) : 1;
        }
      }
      if (first == known + 1) x = from_word<Acc>(wait_for_word(state_word(known), state));
      if (first >= chunk) break;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int64_t k = first + i;
        if (k >= chunk) continue;
        Total<Acc> total;
        total.each_word([&](int j, double& word) { word = wait_for_word(words(k) + kLanes * j, seen[i][j]); });
        if (!total.follow(roundings(), x)) x = wait_for_state(k);
      }
    }
  }

  // The state before the tile, where the words that say it for all lanes are there.
  __device__ bool near_state(int64_t chunk, Acc& x) const {
    const uint64_t first = load_word(state_word(chunk - 1));
    const uint64_t second = chunk > 1 ? load_word(state_word(chunk - 2)) : 0;
    uint64_t seen[S::kTotalWords];
    bool second_known = second != 0;
#pragma unroll
    for (int j = 0; j < S::kTotalWords; ++j) seen[j] = load_word(words(chunk - 1) + kLanes * j);
#pragma unroll
    for (int j = 0; j < S::kTotalWords; ++j) second_known &= seen[j] != 0;
    if (!__any_sync(~0u, first == 0)) {
      x = from_word<Acc>(to_word(first));
      return true;
    }
    if (__any_sync(~0u, !second_known)) return false;
    x = from_word<Acc>(to_word(second));
    Total<Acc> total;
    total.each_word([&](int j, double& word) { word = to_word(seen[j]); });
    if (!total.follow(roundings(), x)) x = wait_for_state(chunk - 1);
    return true;
  }
  __device__ uint64_t* state_word(int64_t chunk) const {
    return words(chunk) + kLanes * S::kTotalWords;
  }
  __device__ Acc wait_for_state(int64_t chunk) const {
    return from_word<Acc>(wait_for_word(state_word(chunk), load_word(state_word(chunk))));
  }
  __device__ void publish_state(const Acc& x) const {
    if (strand_ == 0) {
      put_word(state_word(place_.chunk), as_word(x));
    }
    put_status(kState);
  }

  const Tiles& tiles_;
  const LinearScan& scan_;
  TileShared<T>& shared_;
  const Place& place_;
  const int half_, warp_, lane_, strand_;  // the lane among those of a row, and which of the warp's strands it has
  const unsigned number_;
  int row_bytes_, first_at_;  // from step to step; of the lane's element of the first
  int64_t begin_, first_;     // first step of the tile, and of the warp
  int count_;                 // the warp's steps
  bool owned_;                // whether the lane's channel is within H
  unsigned char *A_, *b_, *x_;
};

template <typename T>
__device__ Place place_of(const Tiles& tiles, int64_t index) {
  // The host sees to it that there are less than 2^32 tiles: 64 bits take far longer to divide.
  const uint32_t slabs = uint32_t(tiles.slabs), per_row = uint32_t(tiles.slabs_per_row);
  const uint32_t chunk = uint32_t(index) / slabs, slab = uint32_t(index) % slabs, row = slab / per_row;
  return {chunk, slab, row, int64_t(slab % per_row) * TileShape<T>::kWidth, chunk < tiles.chunks};
}

template <typename T, bool kGradients>
__device__ void run_tiles(const Tiles& tiles, unsigned char* memory) {
  auto& shared = *reinterpret_cast<TileShared<T>*>(memory);
  auto place = [&](unsigned number) -> Place& { return shared.places[number % TileShared<T>::kPlaces]; };
  const int role = int(threadIdx.x) / (32 * kTileWarps);
  const bool one = tiles.counter == nullptr, sums = kGradients && tiles.problem.summed;
  const bool takes = threadIdx.x == 32 * kTileWarps;
  if (takes) place(0) = place_of<T>(tiles, one ? blockIdx.x : take_tile(tiles.counter));
  __syncthreads();
  bool ended = false;
  unsigned end = 0;  // how many tiles the block has, once it is known
  for (unsigned number = 0;; ++number) {
    if (!ended && !place(number).exists) ended = true, end = number;
    if (ended && number - end >= (sums ? 4 : 3)) break;
    // The tile so many before, and whether there is one.
    const auto has = [&](unsigned ago) { return number >= ago && (!ended || number - ago < end); };
    const auto tile = [&](unsigned ago) { return Tile<T, kGradients, false>(tiles, number - ago, memory); };
    if (role == 0) {
      if (has(0)) tile(0).fetch();
      copy_commit();
      copy_wait<1>();
      __syncwarp();
      if (has(1)) {
        tile(1).make_totals();
        named_barrier<1, 32 * kTileWarps>();
        if (threadIdx.x < 32) tile(1).publish_total();
      }
    } else if (role == 1) {
      int64_t next = 0;
      const bool taken = takes && has(0);
      if (taken && !one) next = take_tile(tiles.counter);
      if (has(3)) tile(3).replay();
      if (taken) place(number + 1) = one ? Place{} : place_of<T>(tiles, next);
    } else {
      if (sums && has(4)) tile(4).store_sums();
      if (has(2)) tile(2).find_starts([] {});
    }
    __syncthreads();
  }
}

// The same where the copy engine reads: of tiles of many blocks, each role at its own pace. A warp that has written its
// rows of a tile asks at once for those of the tile kEngineSlots later. Roles meet at named barriers, two of a kind,
// which tiles take by turns:
//   kMade   the totals of a tile are made
//   kUsed   and the finder is done with them
//   kGiven  every strand has its start
//   kRead   and the writers are done with it
template <typename T, bool kGradients>
__device__ void run_tiles_by_engine(const Tiles& tiles, unsigned char* memory) {
  auto& shared = *reinterpret_cast<TileShared<T>*>(memory);
  auto place = [&](unsigned number) -> Place& { return shared.places[number % TileShared<T>::kPlaces]; };
  const auto tile = [&](unsigned number) { return Tile<T, kGradients, true>(tiles, number, memory); };
  const int role = int(threadIdx.x) / (32 * kTileWarps);
  const bool sums = kGradients && tiles.problem.summed, takes = threadIdx.x == 32 * kTileWarps;
  constexpr int kMade = 2, kUsed = 4, kGiven = 6, kRead = 8, kMany = 32 * kTileWarps + 32;
  constexpr unsigned kAhead = kEngineSlots<T>;  // of who writes
  static_assert(kAhead + 4 <= TileShared<T>::kPlaces);
  if (takes) {
    // One after the other, so that the other blocks take theirs between them.
    for (unsigned i = 0; i <= kAhead; ++i) {
      place(i) = i == 0 || place(i - 1).exists ? place_of<T>(tiles, take_tile(tiles.counter)) : Place{};
    }
    for (auto& barriers : shared.come) {
      for (uint64_t& barrier : barriers) mbarrier_init(shared_address(&barrier));
    }
    mbarrier_publish();
  }
  __syncthreads();
  if (role == 0) {
    unsigned number = 0;
    for (;; ++number) {
      Tile<T, kGradients, true>::wait_for_boxes(shared, number);
      if (number >= 2) barrier_sync(kUsed + number % 2, kMany);
      const bool exists = place(number).exists;
      if (exists) {
        tile(number).complete_boxes();
        tile(number).make_totals();
        named_barrier<1, 32 * kTileWarps>();
        if (threadIdx.x < 32) tile(number).publish_total();
      }
      if (threadIdx.x < 32) barrier_arrive(kMade + number % 2, 64);
      if (!exists) break;
    }
    if (number >= 1) barrier_sync(kUsed + (number - 1) % 2, kMany);
  } else if (role == 1) {
    const auto fetch = [&](unsigned number) {
      if (threadIdx.x % 32 != 0) return;
      if (place(number).exists) {
        tile(number).fetch_boxes();
      } else if (number == 0 || place(number - 1).exists) {
        tile(number).fetch_nothing();
      }
    };
    for (unsigned i = 0; i < kAhead; ++i) fetch(i);
    for (unsigned number = 0;; ++number) {
      barrier_sync(kGiven + number % 2, kMany);
      if (!place(number).exists) break;
      const bool more = takes && place(number + kAhead).exists;
      int64_t next = 0;
      if (more) next = take_tile(tiles.counter);
      tile(number).replay();
      fetch(number + kAhead);
      if (takes) place(number + kAhead + 1) = more ? place_of<T>(tiles, next) : Place{};
      barrier_arrive(kRead + number % 2, kMany);
    }
  } else {
    unsigned number = 0;
    for (;; ++number) {
      const auto wait = [&] {
        if (number < 2) return;
        barrier_sync(kRead + number % 2, kMany);
        if (sums) tile(number - 2).store_sums();
      };
      barrier_sync(kMade + number % 2, 64);
      const bool exists = place(number).exists;
      if (exists) {
        tile(number).find_starts(wait);
        barrier_arrive(kUsed + number % 2, kMany);
      } else {
        wait();
      }
      barrier_arrive(kGiven + number % 2, kMany);
      if (!exists) break;
    }
    if (number >= 1) {
      barrier_sync(kRead + (number - 1) % 2, kMany);
      if (sums) tile(number - 1).store_sums();
    }
  }
}

}  // namespace weft::scan
