// The instructions of a persistent kernel (persistent.jit.cu) that make a pass a training step: gradients with the
// updates that they make, the loss and the head.
//   WEFT_VERTEX_OUTPUT, _OUTPUT_GRAD, _OUTPUTS  buffers of what is pushed and of its gradient; its width
//   WEFT_VERTEX_CROSS_ENTROPY  1, or 0 of the mean squared error
//   WEFT_VERTEX_HEAD           1 where the loss is of what a linear layer makes of it
//   WEFT_VERTEX_CLASSES        width of what the loss is of
//   WEFT_VERTEX_WARPGROUPS     1 where gradients of matrices are summed by products of warpgroups
//
// When the frontiers are over, what is left are sums over all rows: tiles of the gradients of matrices, on the tensor
// cores with fp32 accuracy, and columns of those of vectors and of the head. They go round all blocks of all groups,
// and are applied where they were summed: no atomics, no gradients in memory. Rows of the loss go round the warps of
// all blocks. All sums run in a fixed order.
//
#pragma once

#include "jit/four_elements.jit.cuh"
#include "vertex/exec/cuda/persistent.jit.cuh"

#if WEFT_VERTEX_WARPGROUPS
#include "vertex/exec/cuda/outer_by_warpgroups.jit.cuh"
#else
#include "vertex/exec/cuda/outer_by_warps.jit.cuh"
#endif

namespace {

using weft::FourOf;
using weft::vertex::kPersistentThreads;
using weft::vertex::kSumColumns;
using weft::vertex::kTotalColumns;
using weft::vertex::TrainingArguments;
using weft::vertex::UpdateArgument;

constexpr int kOutputs = WEFT_VERTEX_OUTPUTS, kClasses = WEFT_VERTEX_CLASSES, kMatrices = WEFT_VERTEX_MATRICES,
              kUpdates = WEFT_VERTEX_UPDATES;
constexpr int kTrainingWarps = kPersistentThreads / 32;
constexpr bool kCrossEntropy = WEFT_VERTEX_CROSS_ENTROPY != 0, kHead = WEFT_VERTEX_HEAD != 0;

// As torch's optimizers: `g` of the elements at(0), at(1), ... of a parameter, each below 0 where it is none. All that
// is read is asked for before anything is written, or each element would wait for the one before.
template <int kCount, typename At>
__device__ __forceinline__ void apply(const UpdateArgument& u, const At& at, float (&g)[kCount]) {
  if (u.kind == UpdateArgument::kNone) return;
  float p[kCount], first[kCount], second[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const long long where = at(i);
    if (where < 0) continue;
    p[i] = u.parameter[where];
    first[i] = u.first != nullptr ? u.first[where] : 0.0f;
    second[i] = u.kind == UpdateArgument::kAdam ? u.second[where] : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const long long where = at(i);
    if (where < 0) continue;
    if (u.kind == UpdateArgument::kSgd) {
      const float lr = u.numbers[0], momentum = u.numbers[1], dampening = u.numbers[2], decay = u.numbers[3];
      if (decay != 0.0f) g[i] += decay * p[i];
      if (u.first != nullptr) {
        const float b = momentum * first[i] + (1.0f - dampening) * g[i];
        u.first[where] = b;
        g[i] = u.numbers[4] != 0.0f ? g[i] + momentum * b : b;
      }
      p[i] -= lr * g[i];
    } else {
      const float size = u.numbers[0], of_first = u.numbers[1], beta2 = u.numbers[2], of_second = u.numbers[3];
      p[i] *= u.numbers[6];
      if (u.numbers[7] != 0.0f) g[i] += u.numbers[7] * p[i];
      const float m = first[i] + of_first * (g[i] - first[i]);
      const float v = beta2 * second[i] + of_second * g[i] * g[i];
      u.first[where] = m;
      u.second[where] = v;
      p[i] -= size * m / (sqrtf(v) / u.numbers[5] + u.numbers[4]);
    }
    u.parameter[where] = p[i];
  }
}

// The first or last of the terms of a gradient, each of which is summed by an instruction of its own. One thread has an
// element in all of them.
template <bool kFirst, bool kLast, int kCount, typename At>
__device__ __forceinline__ void add_terms(const UpdateArgument& u, const At& at, float (&g)[kCount]) {
  if constexpr (!kFirst) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) g[i] += at(i) < 0 ? 0.0f : u.partial[at(i)];
  }
  if constexpr (kLast) {
    apply(u, at, g);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (at(i) >= 0) u.partial[at(i)] = g[i];
    }
  }
}

__device__ __forceinline__ float sum_of_warp(float x) {
  for (int apart = 16; apart > 0; apart /= 2) x += __shfl_xor_sync(~0u, x, apart);
  return x;
}
__device__ __forceinline__ float max_of_warp(float x) {
  for (int apart = 16; apart > 0; apart /= 2) {
    const float other = __shfl_xor_sync(~0u, x, apart);
    x = x > other || x != x ? x : other;
  }
  return x;
}

// Units of work go round all blocks, from block kTurn on: calls work(unit) for this block's.
template <int kTurn, int kUnits, typename Work>
__device__ __forceinline__ void each_unit(const Work& work) {
  const int blocks = gridDim.x;
  for (int unit = (blockIdx.x + blocks - kTurn % blocks) % blocks; unit < kUnits; unit += blocks) work(unit);
}

// An element of it, one by one: an infinity is NaN on the tensor cores.
__device__ __noinline__ float one_by_one(const float* left, const float* right, long long left_stride,
                                         long long right_stride, int count) {
  float sum = 0.0f;
  for (int i = 0; i < count; ++i) sum = fmaf(left[i * left_stride], right[i * right_stride], sum);
  return sum;
}

#if WEFT_VERTEX_WARPGROUPS
#define WEFT_VERTEX_OUTER __forceinline__  // their products would wait for each other in a function that is called
#else
#define WEFT_VERTEX_OUTER __noinline__
#endif

// The gradient of a matrix: `left`, transposed, @ `right`, over rows [first, first + count). Element (column of left,
// column of right) is left_stride and right_stride apart in the parameter. A unit is a tile of kTile x kTile.
template <int kLeft, int kRight, int kTurn, bool kFirst, bool kLast>
__device__ WEFT_VERTEX_OUTER void outer(const BufferArgument& left, const BufferArgument& right, int first, int count,
                                        long long left_stride, long long right_stride, const UpdateArgument& update,
                                        bool refused, float* shared) {
  if (refused || update.kind == UpdateArgument::kNone) return;
  constexpr int kAcross = (kRight + kTile - 1) / kTile, kDown = (kLeft + kTile - 1) / kTile;
  const float* const lefts = static_cast<const float*>(left.data) + first * left.stride;
  const float* const rights = static_cast<const float*>(right.data) + first * right.stride;
  each_unit<kTurn, kDown * kAcross>([&](int unit) {
    const int top = unit / kAcross * kTile, begin = unit % kAcross * kTile;
    sum_tile<kLeft, kRight>(lefts, left.stride, top, rights, right.stride, begin, count, shared);
    constexpr int kEach = kTile * kTile / kPersistentThreads;
    const int column = threadIdx.x % kTile;
    const auto row_of_tile = [](int i) { return (i * kPersistentThreads + int(threadIdx.x)) / kTile; };
    float g[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      g[i] = 0.0f;
#pragma unroll
      for (int p = 0; p < kRowParts; ++p) g[i] += shared[(p * kTile + row_of_tile(i)) * kPartialPitch + column];
      const int row = top + row_of_tile(i);
      if (g[i] != g[i] && row < kLeft && begin + column < kRight) {
        g[i] = one_by_one(lefts + row, rights + begin + column, left.stride, right.stride, count);
      }
    }
    add_terms<kFirst, kLast>(
        update,
        [&](int i) -> long long {
          const int row = top + row_of_tile(i), right_column = begin + column;
          return row < kLeft && right_column < kRight ? row * left_stride + right_column * right_stride : -1;
        },
        g);
    __syncthreads();  // the next tile's rows take the place of the sums
  });
}

// Sums over rows by all threads: add(row, column, sums) adds what a row has for each of kTerms sums of column 0 to 7.
// Thread kSumColumns * term + column has the sum.
template <int kTerms, typename Add>
__device__ __forceinline__ float sum_of_columns(int rows, float* shared, const Add& add) {
  constexpr int kAtOnce = 32 / kSumColumns, kSums = kTerms * kSumColumns;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float sums[kTerms] = {};
#pragma unroll 4
  for (int row = warp * kAtOnce + lane / kSumColumns; row < rows; row += kTrainingWarps * kAtOnce) {
    add(row, lane % kSumColumns, sums);
  }
  __syncwarp();
#pragma unroll
  for (int term = 0; term < kTerms; ++term) {
#pragma unroll
    for (int apart = kSumColumns; apart < 32; apart *= 2) sums[term] += __shfl_xor_sync(~0u, sums[term], apart);
    if (lane < kSumColumns) shared[warp * kSums + term * kSumColumns + lane] = sums[term];
  }
  __syncthreads();
  float sum = 0.0f;
  if (threadIdx.x < kSums) {
#pragma unroll
    for (int w = 0; w < kTrainingWarps; ++w) sum += shared[w * kSums + threadIdx.x];
  }
  __syncthreads();
  return sum;
}

// A term of the gradient of a vector of kElements: `width` of them from `to` on are the sums of as many columns of
// `source` from `from` on, the others 0. A unit is kTotalColumns of them, of which a lane takes four neighbours, so
// that few rows are under way one after the other.
template <int kElements, int kTurn, bool kFirst, bool kLast>
__device__ __noinline__ void total(const BufferArgument& source, int first, int count, int from, int width, int to,
                                   const UpdateArgument& update, bool refused, float* shared) {
  if (refused || update.kind == UpdateArgument::kNone) return;
  constexpr int kLanes = kTotalColumns / 4, kAtOnce = kPersistentThreads / kLanes;
  static_assert(kLanes <= 32 && kTotalColumns <= kPersistentThreads);
  const float* const rows = static_cast<const float*>(source.data) + first * source.stride;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool fours = source.stride % 4 == 0 && (from - to) % 4 == 0 && reinterpret_cast<weft::u64>(rows) % 16 == 0;
  each_unit<kTurn, (kElements + kTotalColumns - 1) / kTotalColumns>([&](int unit) {
    const int mine = unit * kTotalColumns + lane % kLanes * 4;  // the first of the lane's elements
    const float* const at = rows + (mine - to + from);
    float sums[4] = {};
    const int begin = threadIdx.x / kLanes;
    if (fours && mine >= to && mine + 4 <= to + width) {
#pragma unroll 8
      for (int row = begin; row < count; row += kAtOnce) {
        const auto x = *reinterpret_cast<const FourOf<float>*>(at + row * source.stride);
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[e] += x.x[e];
      }
    } else {
      for (int row = begin; row < count; row += kAtOnce) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (mine + e >= to && mine + e < to + width) sums[e] += at[row * source.stride + e];
        }
      }
    }
    __syncwarp();
#pragma unroll
    for (int e = 0; e < 4; ++e) {
#pragma unroll
      for (int apart = kLanes; apart < 32; apart *= 2) sums[e] += __shfl_xor_sync(~0u, sums[e], apart);
      if (lane < kLanes) shared[warp * kTotalColumns + lane * 4 + e] = sums[e];
    }
    __syncthreads();
    const int element = unit * kTotalColumns + int(threadIdx.x);
    const bool is = threadIdx.x < kTotalColumns && element < kElements;
    float g[1] = {};
    if (is) {
#pragma unroll
      for (int w = 0; w < kTrainingWarps; ++w) g[0] += shared[w * kTotalColumns + threadIdx.x];
    }
    __syncthreads();
    add_terms<kFirst, kLast>(
        update, [&](int) -> long long { return is ? element : -1; }, g);
  });
}

__device__ __forceinline__ long long row_of(const TrainingArguments& t, int i) {
  return t.roots != nullptr ? t.roots[i] : i;
}

// What all blocks find out by themselves before the loss: how many rows count, and whether the step is refused.
__device__ __noinline__ void look_at_targets(const TrainingArguments& t, float* shared, float& counted, bool& refused) {
  float own = 0.0f, wrong = 0.0f;
  if constexpr (kCrossEntropy) {
    const long long* const classes = static_cast<const long long*>(t.targets);
    for (int i = threadIdx.x; i < t.rows; i += kPersistentThreads) {
      if (classes[i] == t.ignore_index) continue;
      own += 1.0f;
      if (classes[i] < 0 || classes[i] >= kClasses) wrong += 1.0f;
    }
    own = sum_of_warp(own);
    wrong = sum_of_warp(wrong);
    const int warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) shared[2 * warp] = own, shared[2 * warp + 1] = wrong;
    __syncthreads();
    own = wrong = 0.0f;
    for (int w = 0; w < kPersistentThreads / 32; ++w) own += shared[2 * w], wrong += shared[2 * w + 1];
    __syncthreads();
  } else {
    own = float(t.rows) * kClasses;
  }
  counted = own;
  refused = wrong > 0.0f || *t.refused != 0.0f;
}

// A warp for each row of the loss, and of the gradient of the outputs.
__device__ __noinline__ void loss(const TrainingArguments& t, const BufferArgument& outputs,
                                  const BufferArgument& output_grads, float counted, bool refused, float* shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, blocks = gridDim.x;
  float* const scores = shared + warp * (kClasses + 1);
  for (int i = warp * blocks + blockIdx.x; i < t.rows; i += blocks * kTrainingWarps) {
    const long long row = row_of(t, i);
    const float* const y = static_cast<const float*>(outputs.data) + row * outputs.stride;
    float* const of_outputs = static_cast<float*>(output_grads.data) + row * output_grads.stride;
    float* const to = kHead ? t.gradients + (long long)i * kClasses : of_outputs;
    __syncwarp();
    if constexpr (kHead) {
      constexpr int kAtOnce = 4;
      for (int first = 0; first < kClasses; first += kAtOnce) {
        float sums[kAtOnce] = {};
#pragma unroll 8
        for (int p = lane; p < kOutputs; p += 32) {
          const float x = y[p];
#pragma unroll
          for (int k = 0; k < kAtOnce; ++k) {
            if (first + k < kClasses) sums[k] += x * t.weight[(first + k) * kOutputs + p];
          }
        }
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          const float sum = sum_of_warp(sums[k]);
          const int c = first + k;
          if (lane == 0 && c < kClasses) scores[c] = sum + (t.bias != nullptr ? t.bias[c] : 0.0f);
        }
      }
    } else {
      for (int c = lane; c < kClasses; c += 32) scores[c] = y[c];
    }
    __syncwarp();
    float found = 0.0f;
    if constexpr (kCrossEntropy) {
      const long long target = static_cast<const long long*>(t.targets)[i];
      const bool counts = target != t.ignore_index && !refused;
      float most = -infinite(), sum = 0.0f;
      for (int c = lane; c < kClasses; c += 32) most = scores[c] > most || scores[c] != scores[c] ? scores[c] : most;
      most = max_of_warp(most);
      for (int c = lane; c < kClasses; c += 32) sum += expf(scores[c] - most);
      sum = sum_of_warp(sum);
      if (counts) found = logf(sum) + most - scores[target];
      __syncwarp();
      for (int c = lane; c < kClasses; c += 32) {
        const float g = counts ? (expf(scores[c] - most) / sum - (c == target ? 1.0f : 0.0f)) / counted : 0.0f;
        to[c] = scores[c] = g;
      }
    } else {
      const float* const targets = static_cast<const float*>(t.targets) + (long long)i * kClasses;
      for (int c = lane; c < kClasses; c += 32) {
        const float apart = scores[c] - targets[c];
        to[c] = scores[c] = 2.0f * apart / counted;
        found += apart * apart;
      }
      found = sum_of_warp(found);
    }
    if (lane == 0) t.losses[i] = found;
    if constexpr (kHead) {
      __syncwarp();
      for (int p = lane; p < kOutputs; p += 32) {
        float sum = 0.0f;
#pragma unroll 8
        for (int c = 0; c < kClasses; ++c) sum += scores[c] * t.weight[c * kOutputs + p];
        of_outputs[p] = sum;
      }
    }
  }
}

// The updates of the head, and the mean of the loss.
template <int kTurn>
__device__ __noinline__ void update_head(const TrainingArguments& t, const BufferArgument& outputs, float counted,
                                         bool refused, const UpdateArgument& weight, const UpdateArgument& bias,
                                         float* shared) {
  constexpr int kTerms = kClasses < 8 ? kClasses : 8, kClassUnits = (kClasses + kTerms - 1) / kTerms;
  constexpr int kColumnUnits = (kOutputs + kSumColumns - 1) / kSumColumns;
  constexpr int kWeightUnits = kHead ? kClassUnits * kColumnUnits : 0;
  constexpr int kBiasUnits = kHead ? (kClasses + kSumColumns - 1) / kSumColumns : 0;
  each_unit<kTurn, kWeightUnits + kBiasUnits + 1>([&](int unit) {
    if (unit == kWeightUnits + kBiasUnits) {
      const float sum = sum_of_columns<1>((t.rows + kSumColumns - 1) / kSumColumns, shared,
                                          [&](int row, int column, float(&sums)[1]) {
                                            const int i = row * kSumColumns + column;
                                            if (i < t.rows) sums[0] += t.losses[i];
                                          });
      if (threadIdx.x < 32) {
        const float all = sum_of_warp(threadIdx.x < kSumColumns ? sum : 0.0f);
        if (threadIdx.x == 0) {
          t.result[0] = all / counted;
          t.result[1] = *t.refused = refused ? 1.0f : 0.0f;
        }
      }
    } else if (!refused && unit < kWeightUnits) {
      const int column_unit = unit % kColumnUnits * kSumColumns, of_class = unit / kColumnUnits * kTerms;
      const float* const from = static_cast<const float*>(outputs.data) + column_unit;
      float g[] = {sum_of_columns<kTerms>(t.rows, shared, [&](int i, int column, float(&sums)[kTerms]) {
        if (column_unit + column >= kOutputs) return;
        const float x = from[row_of(t, i) * outputs.stride + column];
#pragma unroll
        for (int k = 0; k < kTerms; ++k) {
          if (of_class + k < kClasses) sums[k] += x * t.gradients[(long long)i * kClasses + of_class + k];
        }
      })};
      const int c = of_class + int(threadIdx.x) / kSumColumns, column = column_unit + int(threadIdx.x) % kSumColumns;
      const bool is = threadIdx.x < kTerms * kSumColumns && c < kClasses && column < kOutputs;
      apply(
          weight, [&](int) -> long long { return is ? c * kOutputs + column : -1; }, g);
    } else if (!refused) {
      const int of_class = (unit - kWeightUnits) * kSumColumns;
      float g[] = {sum_of_columns<1>(t.rows, shared, [&](int i, int column, float(&sums)[1]) {
        if (of_class + column < kClasses) sums[0] += t.gradients[(long long)i * kClasses + of_class + column];
      })};
      const int c = of_class + int(threadIdx.x);
      const bool is = threadIdx.x < kSumColumns && c < kClasses;
      apply(
          bias, [&](int) -> long long { return is ? c : -1; }, g);
    }
  });
}

}  // namespace
