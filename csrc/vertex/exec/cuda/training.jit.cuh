// The instructions of a persistent kernel (persistent.jit.cu) that make a pass a training step: gradients with the
// updates that they make, the loss and the head.
//   WEFT_VERTEX_OUTPUT, _OUTPUT_GRAD, _OUTPUTS  buffers of what is pushed and of its gradient; its width
//   WEFT_VERTEX_CROSS_ENTROPY  1, or 0 of the mean squared error
//   WEFT_VERTEX_HEAD           1 where the loss is of what a linear layer makes of it
//   WEFT_VERTEX_CLASSES        width of what the loss is of
//
// When the frontiers are over, what is left are sums over all rows: tiles of the gradients of matrices, on the tensor
// cores with fp32 accuracy, and columns of those of vectors and of the head. They go round all blocks of all groups,
// and are applied where they were summed: no atomics, no gradients in memory. Rows of the loss go round the warps of
// all blocks. All sums run in a fixed order.
//
// Cost: a block multiplies 64 x 64 of a gradient by 32 rows in about 770 clocks of its tensor cores, while it asks for
// the next 16 KB of rows.
#pragma once

#include "common/cuda/ptx.jit.cuh"
#include "jit/resident_product.jit.cuh"
#include "vertex/exec/cuda/persistent.jit.cuh"

namespace {

using weft::FourOf;
using weft::u32;
using weft::vertex::kPersistentThreads;
using weft::vertex::kSumColumns;
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

constexpr int kTile = weft::vertex::kOuterTile, kDepth = 32, kStages = 4, kPitch = kTile + 8;
constexpr int kSide = kDepth * kPitch, kPartialPitch = kTile + 4, kRowParts = 4;
static_assert(2 * kSide * kStages * 4 <= weft::vertex::kOuterShared);
static_assert(kRowParts * kTile * kPartialPitch * 4 <= weft::vertex::kOuterShared);
static_assert(kTile / 32 * (kTile / 32) * kRowParts == kTrainingWarps && kDepth == 8 * kRowParts);

// What a thread asks for of kDepth rows of kTile columns from `column` on: four neighbours; zeros beyond the last row
// and column. Of the next rows at each call.
template <int kWidth>
struct Rows {
  static_assert(kDepth * kTile / 4 == kPersistentThreads);
  const float* from;
  long long next;
  int row, place, columns;  // those that are there from its first on

  __device__ __forceinline__ Rows(const float* rows, long long stride, int column)
      : next(kDepth * stride), row(threadIdx.x / (kTile / 4)) {
    const int c = threadIdx.x % (kTile / 4) * 4;
    from = rows + row * stride + column + c;
    place = row * kPitch + c;
    columns = kWidth - column - c;
  }
  __device__ __forceinline__ void ask(int count, float* to) {
    if constexpr (kWidth % 4 == 0) {
      weft::copy_async_padded(to + place, from, row < count && columns > 0 ? 16 : 0);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) to[place + e] = row < count && e < columns ? from[e] : 0.0f;
    }
    from += next;
  }
};

// An element of it, one by one: an infinity is NaN on the tensor cores.
__device__ __noinline__ float one_by_one(const float* left, const float* right, long long left_stride,
                                         long long right_stride, int count) {
  float sum = 0.0f;
  for (int i = 0; i < count; ++i) sum = fmaf(left[i * left_stride], right[i * right_stride], sum);
  return sum;
}

// The gradient of a matrix: `left`, transposed, @ `right`, over rows [first, first + count). Element (column of left,
// column of right) is left_stride and right_stride apart in the parameter. A unit is a tile of kTile x kTile: four
// warps have a quarter of it each, of every fourth 8 rows, and a warp's columns are dealt to the lanes so that four
// that a lane multiplies are neighbours.
template <int kLeft, int kRight, int kTurn, bool kFirst, bool kLast>
__device__ __noinline__ void outer(const BufferArgument& left, const BufferArgument& right, int first, int count,
                                   long long left_stride, long long right_stride, const UpdateArgument& update,
                                   bool refused, float* shared) {
  if (refused || update.kind == UpdateArgument::kNone) return;
  constexpr int kAcross = (kRight + kTile - 1) / kTile, kDown = (kLeft + kTile - 1) / kTile;
  const float* const lefts = static_cast<const float*>(left.data) + first * left.stride;
  const float* const rights = static_cast<const float*>(right.data) + first * right.stride;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, fourth = lane / 4, in_fourth = lane % 4;
  const int part = warp % kRowParts, down = warp / kRowParts % (kTile / 32) * 32, across = warp / (kRowParts * 2) * 32;
  const int chunks = (count + kDepth - 1) / kDepth;
  each_unit<kTurn, kDown * kAcross>([&](int unit) {
    const int top = unit / kAcross * kTile, begin = unit % kAcross * kTile;
    Rows<kLeft> of_left(lefts, left.stride, top);
    Rows<kRight> of_right(rights, right.stride, begin);
    const auto ask = [&](int chunk) {
      if (chunk < chunks) {
        float* const to = shared + chunk % kStages * 2 * kSide;
        of_left.ask(count - chunk * kDepth, to);
        of_right.ask(count - chunk * kDepth, to + kSide);
      }
      weft::copy_commit();
    };
    for (int chunk = 0; chunk < kStages - 1; ++chunk) ask(chunk);
    float sums[2][4][4] = {}, d[2][4][4] = {};
    // Tensor cores cut sums off instead of rounding them, so that they leave them in time.
    const auto add_up = [&] {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        float& of = d[i / 16][i / 4 % 4][i % 4];
        sums[i / 16][i / 4 % 4][i % 4] += of;
        of = 0.0f;
      }
    };
    for (int chunk = 0; chunk < chunks; ++chunk) {
      weft::copy_wait<kStages - 2>();
      __syncthreads();
      ask(chunk + kStages - 1);
      const float* const stage = shared + chunk % kStages * 2 * kSide + (part * 8 + in_fourth) * kPitch;
      u32 a_high[2][4], a_low[2][4];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const auto x = *reinterpret_cast<const FourOf<float>*>(stage + k * 4 * kPitch + down + fourth * 4);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          weft::split_tf32(x.x[e], a_high[e / 2][k * 2 + e % 2], a_low[e / 2][k * 2 + e % 2]);
        }
      }
      u32 b_high[4][2], b_low[4][2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const auto x = *reinterpret_cast<const FourOf<float>*>(stage + kSide + k * 4 * kPitch + across + fourth * 4);
#pragma unroll
        for (int e = 0; e < 4; ++e) weft::split_tf32(x.x[e], b_high[e][k], b_low[e][k]);
      }
      // The small products first, and between two to the same sum all others.
#pragma unroll
      for (int term = 0; term < 3; ++term) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            weft::mma_tf32(d[m][n], term == 0 ? a_low[m] : a_high[m], term == 1 ? b_low[n] : b_high[n]);
          }
        }
      }
      if (chunk % 8 == 7) add_up();
    }
    add_up();
    weft::copy_wait<0>();
    __syncthreads();
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = down + fourth * 4 + m * 2 + i / 2, column = across + (in_fourth * 2 + i % 2) * 4;
        *reinterpret_cast<FourOf<float>*>(shared + (part * kTile + row) * kPartialPitch +
                                          column) = {{sums[m][0][i], sums[m][1][i], sums[m][2][i], sums[m][3][i]}};
      }
    }
    __syncthreads();
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
// `source` from `from` on, the others 0.
template <int kElements, int kTurn, bool kFirst, bool kLast>
__device__ __noinline__ void total(const BufferArgument& source, int first, int count, int from, int width, int to,
                                   const UpdateArgument& update, bool refused, float* shared) {
  if (refused || update.kind == UpdateArgument::kNone) return;
  const float* const rows = static_cast<const float*>(source.data) + first * source.stride;
  each_unit<kTurn, (kElements + kSumColumns - 1) / kSumColumns>([&](int unit) {
    float g[] = {sum_of_columns<1>(count, shared, [&](int row, int column, float(&sums)[1]) {
      const int element = unit * kSumColumns + column;
      if (element >= to && element < to + width) sums[0] += rows[row * source.stride + element - to + from];
    })};
    const int element = unit * kSumColumns + int(threadIdx.x);
    const bool is = threadIdx.x < kSumColumns && element < kElements;
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
