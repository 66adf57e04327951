// What the gate gradients become: those of weights and biases, dgates^T [h_prev | x | 1] in one pass over
// T B rows, and that of a narrow input, dgates W_ih.
//
// The first is a product of tiny width and enormous depth (20 x 22 over 480,000 rows), where a GEMM's tiles leave most
// of the chip idle. The floor is one read of the rows. They are cut into slabs; a warp takes a 32 x 32 tile of the
// result over its share of a slab, on the tensor cores in split TF32, with operands straight from memory: eight lanes
// read 32 bytes of a row, 16 rows are under way at once. Every 16 rows the sum leaves the tensor core, which cuts off
// instead of rounding. Partial sums are added by a second kernel, in the order of the slabs, so two runs give the same
// bits. Other blocks of that kernel make the gradient of the input: short sequences wait for the host's launches.
//
// At 480,000 rows of a tanh RNN with H = 20 it takes 2.3 times the floor. With the rows through shared memory it took 4
// times, by these products as by fp32 FMAs; a second set of operands in registers costs more in warps than it hides.
#include <algorithm>

#include "common/launch.cuh"
#include "rnn/scan/cuda/scan_kernels.h"
#include "scan/linear/cuda/warp_chunks.cuh"

namespace weft::rnn {
namespace {

constexpr int kTile = 32, kWarpRows = 16, kMaxWarps = 4;

struct Slabs {
  int M, N, inputs;  // result: M = K H rows of dgates' columns, N = H + inputs + 1
  int tiles_m, tiles_n, slabs;
  int block_tiles, shares;  // a block's warps: tiles by shares of the slab's rows
  int64_t rows_per_slab;
};

Slabs slabs_of(const ScanShape& shape, int inputs) {
  Slabs p;
  p.M = chain_blocks(shape.cell) * shape.H;
  p.inputs = inputs;
  p.N = shape.H + inputs + 1;
  p.tiles_m = (p.M + kTile - 1) / kTile;
  p.tiles_n = (p.N + kTile - 1) / kTile;
  const int tiles = p.tiles_m * p.tiles_n;
  p.block_tiles = std::min(tiles, kMaxWarps);
  p.shares = kMaxWarps / p.block_tiles;
  const int64_t rows = shape.T * shape.B;
  // Three blocks per multiprocessor in flight, but no slab so short that the partial sums outweigh the rows.
  const int blocks = (tiles + p.block_tiles - 1) / p.block_tiles;
  const int64_t wanted = std::max(1, 3 * device_limits().sm_count / blocks);
  const int64_t slabs = std::max<int64_t>(1, std::min<int64_t>(wanted, rows / (2 * kWarpRows * p.shares)));
  p.rows_per_slab = std::max<int64_t>(1, (rows + slabs - 1) / slabs);
  p.slabs = int(std::max<int64_t>(1, (rows + p.rows_per_slab - 1) / p.rows_per_slab));
  return p;
}

__global__ void __launch_bounds__(kMaxWarps* scan::warp::kWarp, 3)
    partial_kernel(ScanShape shape, ScanGradients<float> a, Slabs p) {
  __shared__ float total[kMaxWarps][kTile][kTile];
  const int warp = threadIdx.x / scan::warp::kWarp, lane = threadIdx.x % scan::warp::kWarp, quad = lane / 4,
            j = lane % 4;
  const int slot = warp % p.block_tiles, share = warp / p.block_tiles, tiles = p.tiles_m * p.tiles_n;
  const int tile = blockIdx.x * p.block_tiles + slot;
  const int m0 = tile % p.tiles_m * kTile, n0 = tile / p.tiles_m * kTile, H = shape.H;
  const int64_t rows = shape.T * shape.B, previous = shape.reverse ? shape.B : -shape.B;
  const int64_t low = tile < tiles ? blockIdx.y * p.rows_per_slab : rows, high = min(low + p.rows_per_slab, rows);

  // Lane (quad, j) holds columns m0 + 8 i + quad and n0 + 8 i + quad of rows 4 r + j.
  bool has_m[4];
  const float* column[4];  // where the right operand's element of row 0 would be; null for the ones and the padding
  int stride[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int n = n0 + 8 * i + quad;
    has_m[i] = m0 + 8 * i + quad < p.M;
    column[i] = n < H ? a.output + previous * H + n : n < H + p.inputs ? a.input + n - H : nullptr;
    stride[i] = n < H ? H : a.I;
  }

  constexpr int kSteps = kWarpRows / 4;
  float sum[2][4][4] = {};
#pragma unroll 1
  for (int64_t base = low + share * kWarpRows; base < high; base += p.shares * kWarpRows) {
    float left[kSteps][4], right[kSteps][4];
    const bool inside = base + kWarpRows <= high && base + previous >= 0 && base + kWarpRows + previous <= rows;
    if (inside) {
      const float* d = a.dgates + (base + j) * p.M + m0 + quad;
#pragma unroll
      for (int r = 0; r < kSteps; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i) left[r][i] = has_m[i] ? d[4 * r * p.M + 8 * i] : 0.0f;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* x = column[i] + (base + j) * stride[i];
        const float otherwise = n0 + 8 * i + quad == H + p.inputs ? 1.0f : 0.0f;
#pragma unroll
        for (int r = 0; r < kSteps; ++r) right[r][i] = column[i] ? x[4 * r * stride[i]] : otherwise;
      }
    } else {
#pragma unroll
      for (int r = 0; r < kSteps; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int64_t row = base + 4 * r + j;
          const int n = n0 + 8 * i + quad;
          const bool on = row < high;
          const bool first = n < H && (row + previous < 0 || row + previous >= rows);
          left[r][i] = on && has_m[i] ? a.dgates[row * p.M + m0 + 8 * i + quad] : 0.0f;
          right[r][i] = !on                 ? 0.0f
                        : first             ? a.h0[row % shape.B * H + n]
                        : column[i]         ? column[i][row * stride[i]]
                        : n == H + p.inputs ? 1.0f
                                            : 0.0f;
        }
    }
    float part[2][4][4] = {};
#pragma unroll
    for (int r = 0; r < kSteps; r += 2) {
      unsigned left_high[2][4], left_low[2][4], right_high[4][2], right_low[4][2];
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          split_tf32(left[r + half][i], left_high[i / 2][i % 2 + 2 * half], left_low[i / 2][i % 2 + 2 * half]);
          split_tf32(right[r + half][i], right_high[i][half], right_low[i][half]);
        }
#pragma unroll
      for (int nb = 0; nb < 4; ++nb) {
        if (n0 + 8 * nb >= p.N) break;
#pragma unroll
        for (int mb = 0; mb < 2; ++mb) {
          mma_tf32(part[mb][nb], left_low[mb], right_high[nb]);
          mma_tf32(part[mb][nb], left_high[mb], right_low[nb]);
          mma_tf32(part[mb][nb], left_high[mb], right_high[nb]);
        }
      }
    }
#pragma unroll
    for (int mb = 0; mb < 2; ++mb)
#pragma unroll
      for (int nb = 0; nb < 4; ++nb)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[mb][nb][i] += part[mb][nb][i];
  }

  // The shares of the rows, in order.
  for (int s = 0; s < p.shares; ++s) {
    if (share == s) {
#pragma unroll
      for (int mb = 0; mb < 2; ++mb)
#pragma unroll
        for (int nb = 0; nb < 4; ++nb)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float& to = total[slot][16 * mb + 8 * (i / 2) + quad][8 * nb + 2 * j + i % 2];
            to = s == 0 ? sum[mb][nb][i] : to + sum[mb][nb][i];
          }
    }
    __syncthreads();
  }
  const int written = min(p.block_tiles, tiles - int(blockIdx.x) * p.block_tiles) * kTile * kTile;
  float* partial =
      static_cast<float*>(a.workspace) + (int64_t(blockIdx.y) * tiles + blockIdx.x * p.block_tiles) * (kTile * kTile);
  for (int i = threadIdx.x; i < written; i += blockDim.x) partial[i] = (&total[0][0][0])[i];
}

constexpr int kThreads = 256;  // of finish_kernel

// Eight elements of a tile by 32 shares of the slabs per block: few enough slabs each that their loads are under way
// together.
constexpr int kSumElements = 8, kSumShares = kThreads / kSumElements;

// `shares`: a value per thread.
__device__ void add_slabs(const ScanShape& shape, const ScanGradients<float>& a, const Slabs& p, int block,
                          float* shares) {
  const int lane = threadIdx.x % kSumElements, share = threadIdx.x / kSumElements;
  const int tiles = p.tiles_m * p.tiles_n;
  const int at = block * kSumElements + lane;  // tile, row and column within it
  const int tile = at / (kTile * kTile), m = tile % p.tiles_m * kTile + at / kTile % kTile,
            n = tile / p.tiles_m * kTile + at % kTile, H = shape.H;
  if (m >= p.M) return;
  const float* partial = static_cast<const float*>(a.workspace) + at;
  float sum = 0.0f;
#pragma unroll 8
  for (int s = share; s < p.slabs; s += kSumShares) sum += partial[int64_t(s) * tiles * kTile * kTile];
  shares[threadIdx.x] = sum;
  __syncthreads();
  if (share != 0 || n >= p.N) return;
#pragma unroll
  for (int s = 1; s < kSumShares; ++s) sum += shares[s * kSumElements + lane];
  // Where a gate's sides stay apart, its columns are the last two blocks: the input side's, then the recurrent side's.
  const int gate = m / H, G = gate_blocks(shape.cell), apart = apart_gate(shape.cell);
  const bool input_side = gate < G, recurrent_side = gate != apart;
  const int recurrent_row = gate < G ? m : m - H;
  if (n < H) {
    if (a.grad_w_hh && recurrent_side) a.grad_w_hh[recurrent_row * H + n] = sum;
  } else if (n < H + p.inputs) {
    if (input_side) a.grad_w_ih[m * p.inputs + n - H] = sum;
  } else {
    if (a.grad_b_ih && input_side) a.grad_b_ih[m] = sum;
    if (a.grad_b_hh && recurrent_side) a.grad_b_hh[recurrent_row] = sum;
  }
}

// A block takes 64 rows by 32 inputs, a thread one input of eight rows. cuBLAS does it as fast; what it takes on the
// host to choose a kernel is as long as the product.
constexpr int kInputRows = 64, kInputTile = 32;

// left: (64, stride), right: (stride, 32), the stride being the depth in whole vectors of four.
__device__ void input_tile(const ScanShape& shape, const ScanGradients<float>& a, int depth, int64_t block,
                           float* left) {
  const int stride = (depth + 3) / 4 * 4, M = chain_blocks(shape.cell) * shape.H, I = a.I;
  const int tiles = (I + kInputTile - 1) / kInputTile;
  float* const right = left + kInputRows * stride;
  const int64_t rows = shape.T * shape.B, low = block / tiles * kInputRows;
  const int i0 = int(block % tiles) * kInputTile, column = threadIdx.x % 32, group = threadIdx.x / 32;
  for (int at = threadIdx.x; at < stride * kInputTile; at += kThreads) {
    const int k = at / kInputTile, i = i0 + at % kInputTile;
    right[at] = k < depth && i < I ? a.w_ih[k * I + i] : 0.0f;
  }
  for (int at = threadIdx.x; at < kInputRows * stride; at += kThreads) {
    const int64_t row = low + at / stride;
    const int k = at % stride;
    left[at] = k < depth && row < rows ? a.dgates[row * M + k] : 0.0f;
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
    if (row < rows && i0 + column < I) a.grad_input[row * I + i0 + column] = sum[r];
  }
}

// The same for up to four inputs: a thread per element of grad_input. A warp's rows lie side by side, so what a thread
// leaves of a line the others take from the cache.
constexpr int kFewInputs = 4;

// `w`: as many as W_ih has.
__device__ void few_inputs(const ScanShape& shape, const ScanGradients<float>& a, int depth, int64_t block, float* w) {
  const int M = chain_blocks(shape.cell) * shape.H, I = a.I;
  for (int at = threadIdx.x; at < depth * I; at += kThreads) w[at] = a.w_ih[at];
  __syncthreads();
  const int64_t at = block * kThreads + threadIdx.x, row = at / I;
  if (row >= shape.T * shape.B) return;
  const int i = int(at % I);
  const float* d = a.dgates + row * M;
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
  a.grad_input[at] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// The first `sums` blocks add partial sums, the others make grad_input.
__global__ void __launch_bounds__(kThreads) finish_kernel(ScanShape shape, ScanGradients<float> a, Slabs p, int sums) {
  extern __shared__ float4 dynamic4[];
  float* const shared = reinterpret_cast<float*>(dynamic4);
  const int depth = gate_blocks(shape.cell) * shape.H;
  if (int64_t(blockIdx.x) < sums) {
    add_slabs(shape, a, p, int(blockIdx.x), shared);
  } else if (a.I <= kFewInputs) {
    few_inputs(shape, a, depth, blockIdx.x - sums, shared);
  } else {
    input_tile(shape, a, depth, blockIdx.x - sums, shared);
  }
}

}  // namespace

int64_t scan_gradients_workspace(const ScanShape& shape, int inputs) {
  const Slabs p = slabs_of(shape, inputs);
  return int64_t(p.slabs) * p.tiles_m * p.tiles_n * kTile * kTile * int64_t(sizeof(float));
}

void scan_gradients(const ScanShape& shape, const ScanGradients<float>& args, cudaStream_t stream) {
  const Slabs p = slabs_of(shape, args.grad_w_ih ? args.I : 0);
  int sums = 0;
  if (args.grad_w_ih || args.grad_w_hh || args.grad_b_ih || args.grad_b_hh) {
    const int tiles = p.tiles_m * p.tiles_n;
    launch("rnn_scan_partial_gradients", partial_kernel, dim3((tiles + p.block_tiles - 1) / p.block_tiles, p.slabs),
           dim3(p.block_tiles * p.shares * scan::warp::kWarp), 0, stream, shape, args, p);
    sums = tiles * kTile * kTile / kSumElements;
  }
  int64_t blocks = 0;
  int shared = kThreads;  // floats
  if (args.grad_input) {
    const int64_t rows = shape.T * shape.B;
    const int depth = gate_blocks(shape.cell) * shape.H, stride = (depth + 3) / 4 * 4;
    if (args.I <= kFewInputs) {
      blocks = (rows * args.I + kThreads - 1) / kThreads;
      shared = std::max(shared, depth * args.I);
    } else {
      blocks = (rows + kInputRows - 1) / kInputRows * ((args.I + kInputTile - 1) / kInputTile);
      shared = std::max(shared, (kInputRows + kInputTile) * stride);
    }
  }
  launch("rnn_scan_gradients", finish_kernel, sums + blocks, dim3(kThreads), shared * sizeof(float), stream, shape,
         args, p, sums);
}

}  // namespace weft::rnn
