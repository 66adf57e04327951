// The way of A[t] and b[t] from memory to the warp that takes the step, for the dense linear_scan with H <= 32.
#pragma once
#include <cstdint>

#include "common/cuda/ptx.jit.cuh"
#include "scan/linear/linear_scan_args.h"

namespace weft::scan {
namespace {

constexpr int kRingLanes = 32;

// A[t], H lines of H contiguous elements, and b[t], one line.
struct LinesInMemory {
  const char *A, *b;
  int64_t A_step, b_step;  // bytes, as line_step
  int line_step, H;

  __device__ __forceinline__ LinesInMemory(const LinearScan& scan, int64_t batch, int64_t first, int size)
      : A(static_cast<const char*>(scan.A) + (first * scan.A_t + batch * scan.A_b) * size),
        b(static_cast<const char*>(scan.b) + (first * scan.b_t + batch * scan.b_b) * size),
        A_step(scan.A_t * size),
        b_step(scan.b_t * size),
        line_step(int((scan.A_col == 1 ? scan.A_row : scan.A_col) * size)),
        H(int(scan.H)) {}
};

// The words of a line in registers.
template <typename T, int HP>
using Line = uint32_t[HP * sizeof(T) / 4];

// Whether AlignedLines can copy them: every line begins and ends at a multiple of 16 bytes.
inline bool lines_are_aligned(const LinearScan& scan) {
  const int64_t strides = scan.A_t | scan.A_b | (scan.A_col == 1 ? scan.A_row : scan.A_col) | scan.b_t | scan.b_b;
  const uint64_t bytes = uint64_t(strides | scan.H) * element_size(scan.dtype);
  return (bytes | reinterpret_cast<uint64_t>(scan.A) | reinterpret_cast<uint64_t>(scan.b)) % 16 == 0;
}

// Lines of a step that lie kStride apart in shared memory, b behind them; all padding is zero.
template <typename T, int HP, int kStride>
struct AlignedLines {
  static constexpr int kPiece = 16 / int(sizeof(T));
  static constexpr int kElements = HP * kStride + (HP + kPiece - 1) / kPiece * kPiece;
  static constexpr int kPieces = (HP * HP / kPiece + kRingLanes - 1) / kRingLanes;
  static_assert(kStride % kPiece == 0);

  LinesInMemory next;
  // Where the lane's pieces lie, in bytes from A[t], and where they go: computed once, because a division per piece and
  // step took longer than the step's arithmetic.
  int from[kPieces], to[kPieces];
  int lane, pieces, b_pieces;

  __device__ __forceinline__ AlignedLines(const LinearScan& scan, int64_t batch, int64_t first)
      : next(scan, batch, first, sizeof(T)), lane(threadIdx.x % kRingLanes) {
    b_pieces = next.H / kPiece;
    pieces = next.H * b_pieces;
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      const int at = lane + p * kRingLanes, line = at / b_pieces, place = at % b_pieces;
      from[p] = at < pieces ? line * next.line_step + place * 16 : 0;
      to[p] = line * kStride + place * kPiece;
    }
  }

  __device__ __forceinline__ void copy_next(T* stage) {
#pragma unroll
    for (int p = 0; p < kPieces; ++p)
      if (lane + p * kRingLanes < pieces) copy_async<16>(stage + to[p], next.A + from[p]);
    if (lane < b_pieces) copy_async<16>(stage + HP * kStride + lane * kPiece, next.b + lane * 16);
    next.A += next.A_step, next.b += next.b_step;
  }

  struct Step {
    const T *A, *b;
    __device__ __forceinline__ const T* at(int line, int k) const { return A + line * kStride + k; }
    __device__ __forceinline__ bool inside(int, int) const { return true; }
    __device__ __forceinline__ void load(int line, Line<T, HP>& to) const {
#pragma unroll
      for (int p = 0; p < HP / kPiece; ++p) {
        const uint4 piece = reinterpret_cast<const uint4*>(at(line, 0))[p];
        to[4 * p] = piece.x, to[4 * p + 1] = piece.y, to[4 * p + 2] = piece.z, to[4 * p + 3] = piece.w;
      }
    }
  };
  __device__ __forceinline__ Step next_in(const T* stage) {
    return {stage, stage + HP * kStride};
  }
};

// Lines that begin anywhere, in the pieces of 16 bytes that hold them. (Copies as narrow as the lines' alignment took
// up to three times as long, and there are none below 4 bytes.) kTogether: lines that lie one behind the other are
// copied as one, and whoever reads has to ask what is inside; else all padding is zero. b's padding always is.
template <typename T, int HP, bool kTogether>
struct AnyLines {
  static constexpr int kPiece = 16 / int(sizeof(T));
  static constexpr int kLinePieces = (HP + 2 * kPiece - 2) / kPiece;
  // Lines by themselves are kept an odd number of pieces apart, and begin in eight places of the banks.
  static constexpr int kLine = (kLinePieces | 1) * kPiece;
  static constexpr int kElements = HP * kLine + kLinePieces * kPiece;
  static constexpr int kPieces = (HP * kLinePieces + kRingLanes - 1) / kRingLanes;
  static_assert(kPieces * kRingLanes * kPiece >= HP * HP + kPiece - 1);

  LinesInMemory next;
  // The addresses of the step that the warp takes next, in elements, of which the last bits count.
  unsigned A_at, b_at;
  int lane;
  bool together;

  __device__ __forceinline__ AnyLines(const LinearScan& scan, int64_t batch, int64_t first)
      : next(scan, batch, first, sizeof(T)), A_at(element(next.A)), b_at(element(next.b)) {
    lane = threadIdx.x % kRingLanes;
    together = kTogether && next.line_step == next.H * int(sizeof(T));
  }

  static __device__ __forceinline__ unsigned element(const char* p) {
    return unsigned(reinterpret_cast<uint64_t>(p) / sizeof(T));
  }

  // The n-th piece of a line of so many bytes; what lies behind the line is not read and becomes zero.
  template <bool kPads>
  static __device__ __forceinline__ void copy_piece(T* to, const char* line, int length, int n) {
    const int before = int(reinterpret_cast<uint64_t>(line) % 16), bytes = min(before + length - 16 * n, 16);
    if (kPads || bytes > 0) copy_async_padded(to + n * kPiece, line - before + 16 * n, max(bytes, 0));
  }

  __device__ __forceinline__ void copy_next(T* stage) {
    const int row = next.H * int(sizeof(T));
    if (together) {
#pragma unroll
      for (int p = 0; p < kPieces; ++p) copy_piece<false>(stage, next.A, next.H * row, lane + p * kRingLanes);
    } else {
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        const int at = lane + p * kRingLanes, line = at / kLinePieces;
        if (line < next.H)
          copy_piece<!kTogether>(stage + line * kLine, next.A + line * next.line_step, row, at % kLinePieces);
      }
    }
    if (lane < kLinePieces) copy_piece<true>(stage + HP * kLine, next.b, row, lane);
    next.A += next.A_step, next.b += next.b_step;
  }

  struct Step {
    const T *A, *b;
    unsigned A_at, line_step;  // in memory, in elements: what of its first piece comes before a line
    int stride, H;             // in shared memory, from line to line
    __device__ __forceinline__ const T* at(int i, int k) const {
      return A + (i * stride + int((A_at + i * line_step) % kPiece) + k);
    }
    __device__ __forceinline__ bool inside(int i, int k) const { return !kTogether || (i < H && k < H); }
    __device__ __forceinline__ void load(int i, Line<T, HP>& to) const {
      const T* from = at(i, 0);
      if constexpr (sizeof(T) == 2) {
        const unsigned odd = (from - A) % 2;
        const uint32_t* words = reinterpret_cast<const uint32_t*>(from - odd);
#pragma unroll
        for (int k = 0; k < HP / 2; ++k) to[k] = __funnelshift_r(words[k], words[k + 1], 16 * odd);
      } else {
#pragma unroll
        for (int k = 0; k < HP; ++k) reinterpret_cast<T*>(to)[k] = from[k];
      }
    }
  };
  __device__ __forceinline__ Step next_in(const T* stage) {
    const unsigned size = sizeof(T);
    Step step{stage, stage + HP * kLine + b_at % kPiece, A_at, 0, next.H, next.H};
    if (!together) step.line_step = unsigned(next.line_step) / size, step.stride = kLine;
    A_at += unsigned(next.A_step) / size, b_at += unsigned(next.b_step) / size;
    return step;
  }
};

// A ring of kStages steps of one batch row in shared memory.
template <typename T, typename Lines, int kStages>
struct StepRing {
  static constexpr int kElements = Lines::kElements, kBytes = kStages * kElements * int(sizeof(T));
  using Step = typename Lines::Step;

  Lines lines;
  T* stages;
  int steps, ahead = 0;

  __device__ __forceinline__ StepRing(const LinearScan& scan, T* shared, int64_t batch, int64_t first, int steps_)
      : lines(scan, batch, first), stages(shared), steps(steps_) {}

  __device__ __forceinline__ void fetch() {
    if (ahead < steps) lines.copy_next(stages + ahead % kStages * kElements);
    copy_commit();
    ++ahead;
  }

  // Lines' padding must read as zero.
  __device__ __forceinline__ void start() {
    for (int at = lines.lane; at < kStages * kElements; at += kRingLanes) stages[at] = T();
    __syncwarp();
    for (int d = 0; d < kStages - 1; ++d) fetch();
  }

  // One step after the other; its elements are there until the next wait.
  __device__ __forceinline__ Step wait(int step) {
    copy_wait<kStages - 2>();
    __syncwarp();
    return lines.next_in(stages + step % kStages * kElements);
  }
};

}  // namespace
}  // namespace weft::scan
