// Weight and bias gradients of scan_rnn, dgates^T [h_prev | x | 1] in one pass over T B rows, and the gradient of a
// narrow input.
//
// A product of tiny width and enormous depth (20 x 22 over 480,000 rows), where a GEMM's tiles leave most of the chip
// idle. The rows are cut into slabs; a block takes a 32 x 32 tile of the result over one slab: 4 groups of 64 threads
// share the rows, a thread owns 4 x 4 results, rows pass through shared memory. Partial sums are added by a second
// kernel, in the order of the slabs, so two runs give the same bits. Cost: 16 shared-memory cycles per row and tile.
#include <algorithm>

#include "common/launch.cuh"
#include "scan/cuda/scan_rnn.h"

namespace weft {
namespace {

constexpr int kTile = 32, kThreads = 256, kStageRows = 32;
constexpr int kPerThread = kStageRows * kTile / kThreads;

struct Plan {
  int M, N;  // result: M = K H rows of dgates' columns, N = H + I + 1
  int tiles_m, tiles_n, slabs;
  int64_t rows_per_slab;
};

Plan plan(const ScanRnnShape& shape, int I) {
  Plan p;
  p.M = chain_blocks(shape.cell) * shape.H;
  p.N = shape.H + I + 1;
  p.tiles_m = (p.M + kTile - 1) / kTile;
  p.tiles_n = (p.N + kTile - 1) / kTile;
  const int64_t rows = shape.T * shape.B;
  // Four blocks per multiprocessor in flight, but no slab so short that the partial sums outweigh the rows.
  const int64_t wanted = std::max(1, 4 * device_limits().sm_count / (p.tiles_m * p.tiles_n));
  const int64_t slabs = std::max<int64_t>(1, std::min<int64_t>(wanted, rows / 128));
  p.rows_per_slab = std::max<int64_t>(1, (rows + slabs - 1) / slabs);
  p.slabs = int(std::max<int64_t>(1, (rows + p.rows_per_slab - 1) / p.rows_per_slab));
  return p;
}

__global__ void __launch_bounds__(kThreads) partial_kernel(ScanRnnShape shape, ScanRnnWeightGrad<float> a, Plan p) {
  __shared__ alignas(16) float left[2][kStageRows][kTile], right[2][kStageRows][kTile];
  const int m0 = blockIdx.x % p.tiles_m * kTile, n0 = blockIdx.x / p.tiles_m * kTile;
  const int64_t rows = shape.T * shape.B;
  const int64_t low = blockIdx.y * p.rows_per_slab, high = min(low + p.rows_per_slab, rows);
  const int column = threadIdx.x % kTile, first = threadIdx.x / kTile;
  const int m = m0 + column, n = n0 + column, H = shape.H;
  const int64_t previous = (shape.reverse ? shape.B : -shape.B);

  float ahead_left[kPerThread], ahead_right[kPerThread];
  auto fetch = [&](int64_t base) {
#pragma unroll
    for (int r = 0; r < kPerThread; ++r) {
      const int64_t row = base + first + r * (kThreads / kTile);
      float l = 0.0f, x = 0.0f;
      if (row < high) {
        if (m < p.M) l = a.dgates[row * p.M + m];
        if (n < H) {
          const int64_t from = row + previous;
          x = from >= 0 && from < rows ? a.output[from * H + n] : a.h0[row % shape.B * H + n];
        } else if (n < H + a.I) {
          x = a.input[row * a.I + n - H];
        } else if (n == H + a.I) {
          x = 1.0f;
        }
      }
      ahead_left[r] = l;
      ahead_right[r] = x;
    }
  };

  const int share = threadIdx.x / 64, tm = threadIdx.x % 8 * 4, tn = threadIdx.x % 64 / 8 * 4;
  float sum[4][4] = {};
  fetch(low);
  int buffer = 0;
  for (int64_t base = low; base < high; base += kStageRows, buffer ^= 1) {
#pragma unroll
    for (int r = 0; r < kPerThread; ++r) {
      left[buffer][first + r * (kThreads / kTile)][column] = ahead_left[r];
      right[buffer][first + r * (kThreads / kTile)][column] = ahead_right[r];
    }
    __syncthreads();
    fetch(base + kStageRows);
#pragma unroll
    for (int r = 0; r < kStageRows / 4; ++r) {
      const float4 l = *reinterpret_cast<const float4*>(&left[buffer][4 * r + share][tm]);
      const float4 x = *reinterpret_cast<const float4*>(&right[buffer][4 * r + share][tn]);
      const float lv[4] = {l.x, l.y, l.z, l.w}, xv[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int k = 0; k < 4; ++k) sum[i][k] = fmaf(lv[i], xv[k], sum[i][k]);
    }
  }
  // The four shares of the rows, in order.
  float* total = &left[0][0][0];
  for (int s = 0; s < 4; ++s) {
    __syncthreads();
    if (share == s) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          float& to = total[(tm + i) * kTile + tn + k];
          to = s == 0 ? sum[i][k] : to + sum[i][k];
        }
    }
  }
  __syncthreads();
  float* partial = static_cast<float*>(a.workspace) + (int64_t(blockIdx.y) * gridDim.x + blockIdx.x) * (kTile * kTile);
  for (int i = threadIdx.x; i < kTile * kTile; i += kThreads) partial[i] = total[i];
}

// 32 results by 8 shares of the slabs per block.
__global__ void __launch_bounds__(256) sum_kernel(ScanRnnShape shape, ScanRnnWeightGrad<float> a, Plan p) {
  __shared__ float shares[8][32];
  const int lane = threadIdx.x % 32, share = threadIdx.x / 32;
  const int tiles = p.tiles_m * p.tiles_n;
  const int at = blockIdx.x * 32 + lane;  // tile, row and column within it
  const float* partial = static_cast<const float*>(a.workspace) + at;
  float sum = 0.0f;
#pragma unroll 8
  for (int s = share; s < p.slabs; s += 8) sum += partial[int64_t(s) * tiles * kTile * kTile];
  shares[share][lane] = sum;
  __syncthreads();
  if (share != 0) return;
  for (int s = 1; s < 8; ++s) sum += shares[s][lane];

  const int tile = at / (kTile * kTile), m = tile % p.tiles_m * kTile + at / kTile % kTile,
            n = tile / p.tiles_m * kTile + at % kTile, H = shape.H;
  if (m >= p.M || n >= p.N) return;
  // GRU's columns are dr, dz, dn, dm: the input side takes the first three, the recurrent side all but dn.
  const bool gru = shape.cell == Cell::kGru;
  const int block = m / H;
  const bool input_side = !gru || block != 3, recurrent_side = !gru || block != 2;
  const int recurrent_row = gru && block == 3 ? m - H : m;
  if (n < H) {
    if (a.w_hh && recurrent_side) a.w_hh[recurrent_row * H + n] = sum;
  } else if (n < H + a.I) {
    if (a.w_ih && input_side) a.w_ih[m * a.I + n - H] = sum;
  } else {
    if (a.b_ih && input_side) a.b_ih[m] = sum;
    if (a.b_hh && recurrent_side) a.b_hh[recurrent_row] = sum;
  }
}

// grad_input = dgates W_ih for a narrow input: a block takes 64 rows by 32 inputs, a thread one input of eight rows.
// cuBLAS does it as fast; what it takes on the host to choose a kernel is as long as the product.
constexpr int kInputRows = 64, kInputTile = 32;

__global__ void __launch_bounds__(256)
    input_kernel(int64_t rows, int M, int depth, int I, const float* dgates, const float* w_ih, float* grad_input) {
  extern __shared__ float4 dynamic4[];
  const int stride = (depth + 3) / 4 * 4;
  float* left = reinterpret_cast<float*>(dynamic4);  // (64, stride)
  float* right = left + kInputRows * stride;         // (stride, 32)
  const int64_t low = int64_t(blockIdx.x) * kInputRows;
  const int i0 = blockIdx.y * kInputTile, column = threadIdx.x % 32, group = threadIdx.x / 32;
  for (int at = threadIdx.x; at < stride * kInputTile; at += 256) {
    const int k = at / kInputTile, i = i0 + at % kInputTile;
    right[at] = k < depth && i < I ? w_ih[k * I + i] : 0.0f;
  }
  for (int at = threadIdx.x; at < kInputRows * stride; at += 256) {
    const int64_t row = low + at / stride;
    const int k = at % stride;
    left[at] = k < depth && row < rows ? dgates[row * M + k] : 0.0f;
  }
  __syncthreads();
  float sum[8] = {};
  for (int k = 0; k < stride; k += 4) {
    float w[4];
#pragma unroll
    for (int x = 0; x < 4; ++x) w[x] = right[(k + x) * kInputTile + column];
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      const float4 d = *reinterpret_cast<const float4*>(left + (group * 8 + r) * stride + k);
      sum[r] = fmaf(d.x, w[0], fmaf(d.y, w[1], fmaf(d.z, w[2], fmaf(d.w, w[3], sum[r]))));
    }
  }
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    const int64_t row = low + group * 8 + r;
    if (row < rows && i0 + column < I) grad_input[row * I + i0 + column] = sum[r];
  }
}

// The same for up to four inputs: a thread per element of grad_input. A warp's rows lie side by side, so what a thread
// leaves of a line the others take from the cache.
constexpr int kFewInputs = 4;

__global__ void __launch_bounds__(256) few_inputs_kernel(int64_t rows, int M, int depth, int I, const float* dgates,
                                                         const float* w_ih, float* grad_input) {
  __shared__ float w[128 * kFewInputs];
  for (int at = threadIdx.x; at < depth * I; at += 256) w[at] = w_ih[at];
  __syncthreads();
  const int64_t at = int64_t(blockIdx.x) * 256 + threadIdx.x, row = at / I;
  if (row >= rows) return;
  const int i = int(at % I);
  const float* d = dgates + row * M;
  float sum[4] = {};
  int k = 0;
  if (M % 4 == 0) {
    for (; k + 4 <= depth; k += 4) {
      const float4 v = *reinterpret_cast<const float4*>(d + k);
      sum[0] = fmaf(v.x, w[k * I + i], sum[0]);
      sum[1] = fmaf(v.y, w[(k + 1) * I + i], sum[1]);
      sum[2] = fmaf(v.z, w[(k + 2) * I + i], sum[2]);
      sum[3] = fmaf(v.w, w[(k + 3) * I + i], sum[3]);
    }
  }
  for (; k < depth; ++k) sum[0] = fmaf(d[k], w[k * I + i], sum[0]);
  grad_input[at] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

}  // namespace

void scan_rnn_input_grad(const ScanRnnShape& shape, int I, const float* dgates, const float* w_ih, float* grad_input,
                         cudaStream_t stream) {
  const int64_t rows = shape.T * shape.B;
  const int depth = gate_blocks(shape.cell) * shape.H, stride = (depth + 3) / 4 * 4;
  if (I <= kFewInputs) {
    return launch("scan_rnn_input_grad", few_inputs_kernel, (rows * I + 255) / 256, dim3(256), 0, stream, rows,
                  chain_blocks(shape.cell) * shape.H, depth, I, dgates, w_ih, grad_input);
  }
  launch("scan_rnn_input_grad", input_kernel,
         Grid((rows + kInputRows - 1) / kInputRows, (I + kInputTile - 1) / kInputTile), dim3(256),
         (kInputRows + kInputTile) * stride * sizeof(float), stream, rows, chain_blocks(shape.cell) * shape.H, depth, I,
         dgates, w_ih, grad_input);
}

int64_t scan_rnn_weight_grad_workspace(const ScanRnnShape& shape, int I) {
  const Plan p = plan(shape, I);
  return int64_t(p.slabs) * p.tiles_m * p.tiles_n * kTile * kTile * int64_t(sizeof(float));
}

void scan_rnn_weight_grad(const ScanRnnShape& shape, const ScanRnnWeightGrad<float>& args, cudaStream_t stream) {
  const Plan p = plan(shape, args.I);
  const unsigned tiles = unsigned(p.tiles_m * p.tiles_n);
  launch("scan_rnn_weight_grad", partial_kernel, dim3(tiles, p.slabs), dim3(kThreads), 0, stream, shape, args, p);
  launch("scan_rnn_weight_grad_sum", sum_kernel, dim3(tiles * kTile * kTile / 32), dim3(256), 0, stream, shape, args,
         p);
}

}  // namespace weft
