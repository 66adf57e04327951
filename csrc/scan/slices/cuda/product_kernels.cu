// The product of a slice's steps, A[T-1] ... A[0], for H <= 32.
//
// Floor: A is read once; H^3 multiply-adds in double for each step and row.
//
// Decomposition: a block has a piece of time of a batch row, as many pieces as keep the device busy; a second kernel
//   multiplies a row's pieces, one block for each row. A thread owns an element of some rows of the product in one
//   column, and keeps that column's exponent.
// Shared memory: the product and a step's A twice each, so that a step has one barrier: while one is multiplied, the
//   next product is written, and the next A, which was loaded a step ahead, comes in. 25 KB, or eight blocks of an SM.
// Numbers: what a column's largest leaves after kFactors factors of a float is in a double's range, where it is brought
//   back to 1.
#include <algorithm>

#include "common/integers.h"
#include "common/launch.cuh"
#include "scan/slices/cuda/product_kernels.h"

namespace weft::scan {
namespace {

constexpr int kMaxH = int(kProductMaxH), kThreads = 256, kRows = kMaxH / (kThreads / kMaxH);
constexpr int kElements = kMaxH * kMaxH / kThreads;  // of a step's A, that a thread brings
constexpr int64_t kLeastPiece = 64;                  // steps
constexpr int kBlocksAtOnce = 8;

// Of a number that is not zero, in [1, 2); 0 of what is not finite.
__device__ inline int64_t exponent_of(double x) {
  int64_t exponent = 0;
  if (is_finite_bits(x)) mantissa_of(x, exponent);
  return exponent;
}

// x 2^e, for e that a number of [1, 2) is not raised by
__device__ inline double raised(double x, int64_t e) {
  return scalbn(x, int(e < -4000 ? -4000 : e));
}

constexpr int64_t kOfZero = -(1ll << 40);       // the exponent of a zero: below every other
constexpr int64_t kOfZeroColumn = kOfZero / 2;  // that of a column of zeros, which may meet other exponents

// Where a thread is: `groups` threads share a column, each of which has every groups-th row.
struct Owner {
  int H, column, group, groups, rows;
  __device__ explicit Owner(int size) : H(size) {
    groups = min(kThreads / H, H);
    column = int(threadIdx.x) % H, group = int(threadIdx.x) / H;
    rows = group < groups ? (H - group + groups - 1) / groups : 0;
  }
  __device__ int row(int r) const { return group + r * groups; }
  // The largest of what the column's threads bring. The whole block calls it, and meets before it does again.
  template <typename T>
  __device__ T largest(T mine, T* brought) const {
    brought[threadIdx.x] = mine;
    __syncthreads();
    for (int g = 0; rows > 0 && g < groups; ++g) {
      const T other = brought[g * H + column];
      mine = other > mine ? other : mine;
    }
    return mine;
  }
};

// sums[r] = the thread's r-th element of left * right, both (H, H).
template <typename E>
__device__ inline void multiply(const Owner& owner, const E* left, const double* right, double (&sums)[kRows]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) sums[r] = 0;
  if (owner.rows == 0) return;
#pragma unroll 4
  for (int k = 0; k < owner.H; ++k) {
    const double x = right[k * owner.H + owner.column];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r < owner.rows) sums[r] = fma(double(left[owner.row(r) * owner.H + k]), x, sums[r]);
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    product_kernel(const __grid_constant__ DenseProduct p, int64_t steps, double* parts, int64_t* exponents) {
  __shared__ double products[2][kMaxH * kMaxH], brought[kThreads];
  __shared__ float A[2][kMaxH * kMaxH];
  const int H = int(p.H), all = H * H;
  const Owner owner(H);
  const int64_t row = blockIdx.x, piece = blockIdx.y, begin = piece * steps;
  const int count = int(min(steps, p.T - begin));
  const float* from = static_cast<const float*>(p.A) + begin * p.A_t + row * p.A_b;
  // Neighbours read neighbours, by rows or by columns.
  const bool by_columns = p.A_row == 1 && p.A_col != 1;
  float coming[kElements];
  auto fetch = [&](int step) {
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      const int at = int(threadIdx.x) + e * kThreads, i = at / H, k = at % H;
      coming[e] = 0;
      if (step < count && at < all) {
        coming[e] = by_columns ? from[step * p.A_t + i * p.A_col + k] : from[step * p.A_t + i * p.A_row + k * p.A_col];
      }
    }
  };
  auto keep = [&](int slot) {
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      const int at = int(threadIdx.x) + e * kThreads, i = at / H, k = at % H;
      if (at < all) A[slot][by_columns ? k * H + i : at] = coming[e];
    }
  };
  auto put = [&](int slot, const double(&numbers)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r < owner.rows) products[slot][owner.row(r) * H + owner.column] = numbers[r];
    }
  };

  int64_t exponent = 0;
  double next[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) next[r] = owner.row(r) == owner.column ? 1 : 0;
  put(0, next);
  fetch(0);
  keep(0);
  fetch(1);
  __syncthreads();
#pragma unroll 1
  for (int step = 0; step < count; ++step) {
    const int now = step & 1;
    multiply(owner, A[now], products[now], next);
    if (step % kFactors == kFactors - 1 || step == count - 1) {
      double mine = 0;
#pragma unroll
      for (int r = 0; r < kRows; ++r) mine = fmax(mine, fabs(next[r]));
      const double largest = owner.largest(mine, brought);
      if (largest != 0) {
        const int64_t e = exponent_of(largest);
#pragma unroll
        for (int r = 0; r < kRows; ++r) next[r] = scalbn(next[r], int(-e));
        exponent += e;
      } else {
        exponent = kOfZeroColumn;  // nothing of it may hide other columns of the piece
      }
    }
    put(now ^ 1, next);
    keep(now ^ 1);
    fetch(step + 2);
    __syncthreads();
  }
  const int64_t part = piece * p.B + row;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r < owner.rows) parts[part * all + owner.row(r) * H + owner.column] = next[r];
  }
  if (owner.group == 0) exponents[part * H + owner.column] = exponent;
}

// A row's pieces, one after the other. Row k of what there is takes the exponent of column k of the next piece.
__global__ void __launch_bounds__(kThreads)
    pieces_kernel(const double* parts, const int64_t* exponents, int64_t pieces, int64_t B, int H, int32_t* out) {
  __shared__ double products[kMaxH * kMaxH], left[kMaxH * kMaxH];
  __shared__ int64_t brought[kThreads];
  const Owner owner(H);
  const int64_t row = blockIdx.x;
  const int all = H * H;
  double now[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    now[r] = r < owner.rows ? parts[row * all + owner.row(r) * H + owner.column] : 0;
  }
  int64_t exponent = owner.rows > 0 ? exponents[row * H + owner.column] : 0;
#pragma unroll 1
  for (int64_t piece = 1; piece < pieces; ++piece) {
    const int64_t part = piece * B + row;
    int64_t own[kRows], mine = kOfZero;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      own[r] = kOfZero;
      if (r >= owner.rows || now[r] == 0) continue;
      own[r] = exponents[part * H + owner.row(r)];
      mine = max(mine, exponent_of(now[r]) + own[r]);
    }
    const int64_t largest = owner.largest(mine, brought);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r < owner.rows) {
        products[owner.row(r) * H + owner.column] = now[r] == 0 ? 0 : raised(now[r], own[r] - largest);
      }
    }
    for (int at = int(threadIdx.x); at < all; at += kThreads) left[at] = parts[part * all + at];
    __syncthreads();
    multiply(owner, left, products, now);
    if (largest != kOfZero) exponent += largest;
    __syncthreads();
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r < owner.rows) {
      out[row * all + owner.row(r) * H + owner.column] = pack_product<float>(Scaled{now[r], exponent});
    }
  }
}

}  // namespace

void slice_product_cuda(const DenseProduct& p, int32_t* out, const Workspace& workspace, cudaStream_t stream) {
  const int64_t wanted = ceil_div(kBlocksAtOnce * int64_t(device_limits().sm_count), p.B);
  const int64_t most = std::clamp<int64_t>(std::min(wanted, p.T / kLeastPiece), 1, 65535);
  const int64_t steps = std::max<int64_t>(1, ceil_div(p.T, most)), pieces = std::max<int64_t>(1, ceil_div(p.T, steps));
  const size_t numbers = size_t(pieces) * p.B * p.H;
  double* const parts = static_cast<double*>(workspace(numbers * (p.H + 1) * sizeof(double)));
  int64_t* const exponents = reinterpret_cast<int64_t*>(parts + numbers * p.H);
  launch("slice_product", product_kernel, Grid(p.B, pieces), kThreads, 0, stream, p, steps, parts, exponents);
  launch("slice_product_pieces", pieces_kernel, Grid(p.B), kThreads, 0, stream, static_cast<const double*>(parts),
         static_cast<const int64_t*>(exponents), pieces, p.B, int(p.H), out);
}

}  // namespace weft::scan
