// The way of A[t] and b[t] from memory to the warp that takes the step, for the dense linear_scan with H <= 32.
#pragma once
#include <cstdint>

#include "common/async_copy.cuh"
#include "scan/linear_scan_args.h"

namespace weft::scan {
namespace {

// A ring of kStages steps of one batch row in shared memory: A[t] as it lies in memory, `lines` of H contiguous
// elements, and b[t]. Copies are as wide as pointers and strides allow; a width below 4 bytes has no asynchronous copy.
template <typename T, int HP, int kStride_, int kStages>
struct StepRing {
  static constexpr int kStride = kStride_, kLanes = 32;
  // The widest copy whose destinations are aligned.
  static constexpr int kMaxWidth = kStride * sizeof(T) % 16 == 0 ? 16 : kStride * sizeof(T) % 8 == 0 ? 8 : 4;
  static constexpr int kElements = (HP * kStride + HP + 15) / 16 * 16;
  static constexpr int kBytes = kStages * kElements * int(sizeof(T));

  // Pieces of A whose places a lane keeps in registers: all of them in copies of 16 bytes.
  static constexpr int kMaxPieces = (HP * HP * int(sizeof(T)) / 16 + kLanes - 1) / kLanes;

  T* stages;
  const char *A, *b;
  int64_t A_step, b_step;  // bytes
  // Where the lane's pieces lie, and where they go, in bytes from A[t] and from the stage: computed once, because a
  // division per piece and step took longer than the step's arithmetic.
  int from[kMaxPieces], to[kMaxPieces];
  int lane, H, width, pieces, b_pieces, line_step, ahead = 0, steps;
  // Where A is copied by lines: the lane's first line, H if it has none, and how many lines the warp takes together.
  int first_line, lines_at_once;

  __device__ __forceinline__ StepRing(const LinearScan& scan, T* shared, int64_t batch, int64_t first, int steps_)
      : stages(shared), steps(steps_) {
    lane = threadIdx.x % kLanes;
    H = int(scan.H);
    const int64_t size = sizeof(T);
    A_step = scan.A_t * size, b_step = scan.b_t * size;
    line_step = int((scan.A_col == 1 ? scan.A_row : scan.A_col) * size);
    A = static_cast<const char*>(scan.A) + (first * scan.A_t + batch * scan.A_b) * size;
    b = static_cast<const char*>(scan.b) + (first * scan.b_t + batch * scan.b_b) * size;
    // Anything that must be a multiple of the width.
    const uint64_t odd =
        uint64_t(A) | uint64_t(A_step) | uint64_t(line_step) | uint64_t(H * size) | uint64_t(b) | uint64_t(b_step);
    width = min(odd % 16 == 0 ? 16 : odd % 8 == 0 ? 8 : odd % 4 == 0 ? 4 : 2, kMaxWidth);
    b_pieces = H * int(size) / width;
    pieces = H * b_pieces;
#pragma unroll
    for (int p = 0; p < kMaxPieces; ++p) {
      const int at = lane + p * kLanes, line = at / b_pieces, place = at % b_pieces;
      from[p] = line * line_step + place * width;
      to[p] = line * kStride * int(size) + place * width;
    }
    lines_at_once = kLanes / b_pieces;
    first_line = lane < lines_at_once * b_pieces ? lane / b_pieces : H;
  }

  template <int kWidth>
  __device__ __forceinline__ void copy_one(char* to_, const char* from_) {
    if constexpr (kWidth >= 4) {
      copy_async<kWidth>(to_, from_);
    } else {
      *reinterpret_cast<T*>(to_) = *reinterpret_cast<const T*>(from_);
    }
  }

  template <int kWidth>
  __device__ __forceinline__ void copy_lines(char* stage) {
    char* to_ = stage + to[0];
    const char* from_ = A + from[0];
    const int to_step = lines_at_once * kStride * int(sizeof(T)), from_step = lines_at_once * line_step;
    // Copies below 4 bytes are ordinary loads, some of which are under way together; more would take registers.
    constexpr int kTogether = kWidth >= 4 ? 1 : 4;
#pragma unroll 1
    for (int at = first_line; at < H; at += kTogether * lines_at_once) {
      if constexpr (kWidth >= 4) {
        copy_one<kWidth>(to_, from_);
      } else {
        T held[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i)
          if (at + i * lines_at_once < H) held[i] = *reinterpret_cast<const T*>(from_ + i * from_step);
#pragma unroll
        for (int i = 0; i < kTogether; ++i)
          if (at + i * lines_at_once < H) *reinterpret_cast<T*>(to_ + i * to_step) = held[i];
      }
      to_ += kTogether * to_step, from_ += kTogether * int64_t(from_step);
    }
  }

  template <int kWidth>
  __device__ __forceinline__ void copy(char* stage) {
    if constexpr (kWidth >= int(sizeof(T))) {
      if (pieces <= kMaxPieces * kLanes) {
#pragma unroll
        for (int p = 0; p < kMaxPieces; ++p)
          if (lane + p * kLanes < pieces) copy_one<kWidth>(stage + to[p], A + from[p]);
      } else {
        copy_lines<kWidth>(stage);  // in copies of less than 16 bytes, more pieces than a lane keeps places for
      }
      if (lane < b_pieces)  // of which there are no more than H
        copy_one<kWidth>(stage + HP * kStride * int(sizeof(T)) + lane * kWidth, b + lane * kWidth);
    }
  }

  __device__ __forceinline__ void fetch() {
    if (ahead < steps) {
      char* stage = reinterpret_cast<char*>(stages + ahead % kStages * kElements);
      if (width == 16) {
        copy<16>(stage);
      } else if (width == 8) {
        copy<8>(stage);
      } else if (width == 4) {
        copy<4>(stage);
      } else {
        copy<2>(stage);
      }
      A += A_step, b += b_step;
    }
    copy_commit();
    ++ahead;
  }

  // The padding of lines and of lines' ends must read as zero.
  __device__ __forceinline__ void start() {
    for (int at = lane; at < kStages * kElements; at += kLanes) stages[at] = T();
    __syncwarp();
    for (int d = 0; d < kStages - 1; ++d) fetch();
  }

  __device__ __forceinline__ const T* wait(int step) {
    copy_wait<kStages - 2>();
    __syncwarp();
    return stages + step % kStages * kElements;
  }
};

}  // namespace
}  // namespace weft::scan
