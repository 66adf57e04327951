// The seams between chunks that are rows of the persistent kernel's batch: after each round, a warp for each of them.
#pragma once
#include "rnn/newton/chunks.h"
#include "rnn/newton/cuda/newton_kernels.h"
#include "scan/newton/counters.jit.cuh"

namespace weft::rnn {
namespace {

constexpr int kSeamThreads = 128;

// Seam `index`: of a chunk and a sequence, in the order of the rows, with the next chunk of the sequence. Where the end
// meets what the next chunk began with, that stays, and takes the end's place; else the next chunk begins with the end
// in the next round, whose gate opens.
template <typename scalar>
__device__ __forceinline__ void mend_seam(const NewtonSeams<scalar>& a, int64_t index, int lane) {
  const int64_t end = index * a.H, start = (index + a.B) * a.H;
  scalar apart = 0;
  bool far = false;
  for (int i = lane; i < a.H; i += 32) {
    const scalar in_h = mismatch(a.end_h[end + i], a.start_h[start + i]);
    const scalar in_c = a.end_c == nullptr ? scalar(0) : mismatch(a.end_c[end + i], a.start_c[start + i]);
    far = far || !meets(a.end_h[end + i], a.start_h[start + i]) ||
          (a.end_c != nullptr && !meets(a.end_c[end + i], a.start_c[start + i]));
    apart = in_h > apart ? in_h : apart;
    apart = in_c > apart ? in_c : apart;
  }
  far = __any_sync(~0u, far);
  for (int i = lane; i < a.H; i += 32) {
    scalar& to_h = far ? a.start_h[start + i] : a.end_h[end + i];
    to_h = far ? a.end_h[end + i] : a.start_h[start + i];
    if (a.end_c == nullptr) continue;
    scalar& to_c = far ? a.start_c[start + i] : a.end_c[end + i];
    to_c = far ? a.end_c[end + i] : a.start_c[start + i];
  }
  if (far && lane == 0) *a.next_gate = 1;
  if (a.statistics == nullptr) return;
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    const scalar other = __shfl_xor_sync(~0u, apart, lanes);
    apart = other > apart ? other : apart;
  }
  if (lane != 0) return;
  int64_t* const statistics = a.statistics + 4 * (index % a.B);
  if (far) {
    scan::raise_count(statistics, a.round + 1);
    scan::add_count(statistics + 1, least(a.chunks.length, a.T - (index / a.B + 1) * a.chunks.length));
  } else {
    scan::raise_count(statistics + 2, int64_t(__float_as_uint(float(apart))));
  }
}

}  // namespace
}  // namespace weft::rnn
