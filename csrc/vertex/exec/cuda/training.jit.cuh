// The instructions of a persistent kernel (persistent.jit.cu) that make a pass a training step: gradients with the
// updates that they make, the loss and the head.
//   WEFT_VERTEX_OUTPUT, _OUTPUT_GRAD, _OUTPUTS  buffers of what is pushed and of its gradient; its width
//   WEFT_VERTEX_CROSS_ENTROPY  1, or 0 of the mean squared error
//   WEFT_VERTEX_HEAD           1 where the loss is of what a linear layer makes of it
//   WEFT_VERTEX_CLASSES        width of what the loss is of
//
// A block sums the gradient of its tile of a matrix over all rows, on the tensor cores with fp32 accuracy, and applies
// it where it was summed: no atomics, no gradients in memory. Rows of the loss go round the warps of all blocks. All
// sums run in a fixed order.
#pragma once

#include "common/cuda/ptx.jit.cuh"
#include "jit/resident_product.jit.cuh"
#include "vertex/exec/cuda/persistent.jit.cuh"

namespace {

using weft::u32;
using weft::vertex::kPersistentThreads;
using weft::vertex::TrainingArguments;
using weft::vertex::UpdateArgument;

constexpr int kOutputs = WEFT_VERTEX_OUTPUTS, kClasses = WEFT_VERTEX_CLASSES, kMatrices = WEFT_VERTEX_MATRICES,
              kUpdates = WEFT_VERTEX_UPDATES;
constexpr bool kCrossEntropy = WEFT_VERTEX_CROSS_ENTROPY != 0, kHead = WEFT_VERTEX_HEAD != 0;

// As torch's optimizers, element by element.
__device__ __forceinline__ void apply(const UpdateArgument& u, long long at, float g) {
  if (u.kind == UpdateArgument::kNone) return;
  float p = u.parameter[at];
  if (u.kind == UpdateArgument::kSgd) {
    const float lr = u.numbers[0], momentum = u.numbers[1], dampening = u.numbers[2], decay = u.numbers[3];
    if (decay != 0.0f) g += decay * p;
    if (u.first != nullptr) {
      const float b = momentum * u.first[at] + (1.0f - dampening) * g;
      u.first[at] = b;
      g = u.numbers[4] != 0.0f ? g + momentum * b : b;
    }
    p -= lr * g;
  } else {
    const float size = u.numbers[0], of_first = u.numbers[1], beta2 = u.numbers[2], of_second = u.numbers[3];
    p *= u.numbers[6];
    if (u.numbers[7] != 0.0f) g += u.numbers[7] * p;
    const float before = u.first[at], m = before + of_first * (g - before);
    const float v = beta2 * u.second[at] + of_second * g * g;
    u.first[at] = m;
    u.second[at] = v;
    p -= size * m / (sqrtf(v) / u.numbers[5] + u.numbers[4]);
  }
  u.parameter[at] = p;
}

// The first or last of the terms of a gradient, each of which is summed by an instruction of its own. One thread has an
// element in all of them.
template <bool kFirst, bool kLast>
__device__ __forceinline__ void add_term(const UpdateArgument& u, long long at, float g) {
  if constexpr (!kFirst) g += u.partial[at];
  if constexpr (kLast) {
    apply(u, at, g);
  } else {
    u.partial[at] = g;
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

// The gradient of a matrix: the block's columns of `own`, transposed, @ `other`, over rows [first, first + count). Each
// group takes some columns of `other`. Element (column of own, column of other) is own_stride and other_stride apart in
// the parameter.
template <typename Columns, int kOther, bool kFirst, bool kLast>
__device__ __noinline__ void outer(const BufferArgument& own, const BufferArgument& other, int first, int count,
                                   int rank, int group, int groups, long long own_stride, long long other_stride,
                                   const UpdateArgument& update, bool refused) {
  if (refused || update.kind == UpdateArgument::kNone) return;
  constexpr int kWarps = kPersistentThreads / 32, kAtOnce = 4, kTiles = (Columns::count() + 15) / 16;
  constexpr int kOtherTiles = (kOther + 7) / 8;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, fourth = lane / 4, in_fourth = lane % 4;
  const float* const left = static_cast<const float*>(own.data) + first * own.stride;
  const float* const right = static_cast<const float*>(other.data) + first * other.stride;
  constexpr int kUnits = kTiles * ((kOtherTiles + kAtOnce - 1) / kAtOnce);
  for (int unit = warp * groups + group; unit < kUnits; unit += kWarps * groups) {
    const int tile = unit % kTiles, tiles = unit / kTiles * kAtOnce;
    int columns[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int local = tile * 16 + half * 8 + fourth;
      columns[half] = local < Columns::count() ? Columns::of(local, rank) : -1;
    }
    float d[kAtOnce][4] = {};
#pragma unroll 4
    for (int row = 0; row < count; row += 8) {
      float a[4], b[kAtOnce][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = row + in_fourth + i / 2 * 4, column = columns[i % 2];
        a[i] = r < count && column >= 0 ? left[r * own.stride + column] : 0.0f;
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int column = (tiles + n) * 8 + fourth;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int r = row + in_fourth + i * 4;
          b[n][i] = r < count && column < kOther ? right[r * other.stride + column] : 0.0f;
        }
      }
      u32 a_high[4], a_low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a_high[i] = weft::cut_tf32(__float_as_uint(a[i]));
        a_low[i] = weft::cut_off_tf32(__float_as_uint(a[i]));
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        u32 b_high[2], b_low[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          b_high[i] = weft::cut_tf32(__float_as_uint(b[n][i]));
          b_low[i] = weft::cut_off_tf32(__float_as_uint(b[n][i]));
        }
        weft::mma_tf32(d[n], a_low, b_high);
        weft::mma_tf32(d[n], a_high, b_low);
        weft::mma_tf32(d[n], a_high, b_high);
      }
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = (tiles + n) * 8 + in_fourth * 2 + i % 2;
        if (columns[i / 2] >= 0 && column < kOther) {
          add_term<kFirst, kLast>(update, columns[i / 2] * own_stride + column * other_stride, d[n][i]);
        }
      }
    }
  }
}

// A term of the gradient of a vector, of which the block has `Columns`: `width` elements from `to` on are the sums of
// as many columns of `source` from `from` on, the others 0.
template <typename Columns, bool kFirst, bool kLast>
__device__ __noinline__ void total(const BufferArgument& source, int first, int count, int rank, int group, int groups,
                                   int from, int width, int to, const UpdateArgument& update, bool refused) {
  if (refused || update.kind == UpdateArgument::kNone) return;
  const float* const rows = static_cast<const float*>(source.data) + first * source.stride;
  const int lane = threadIdx.x % 32;
  for (int local = threadIdx.x / 32 * groups + group; local < Columns::count();
       local += kPersistentThreads / 32 * groups) {
    const int element = Columns::of(local, rank);
    if (element < 0) continue;
    float sum = 0.0f;
    if (element >= to && element < to + width) {
#pragma unroll 4
      for (int i = lane; i < count; i += 32) sum += rows[i * source.stride + element - to + from];
      sum = sum_of_warp(sum);
    }
    if (lane == 0) add_term<kFirst, kLast>(update, element, sum);
  }
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

// A warp for each row of the loss.
__device__ __noinline__ void loss(const TrainingArguments& t, const BufferArgument& outputs,
                                  const BufferArgument& output_grads, int rank, int blocks, float counted, bool refused,
                                  float* shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float* const scores = shared + warp * (kClasses + 1);
  for (int i = warp * blocks + rank; i < t.rows; i += blocks * (kPersistentThreads / 32)) {
    const long long row = row_of(t, i);
    const float* const y = static_cast<const float*>(outputs.data) + row * outputs.stride;
    float* const to = kHead ? t.gradients + (long long)i * kClasses
                            : static_cast<float*>(output_grads.data) + row * output_grads.stride;
    __syncwarp();
    if constexpr (kHead) {
      for (int c = 0; c < kClasses; ++c) {
        float sum = 0.0f;
        for (int p = lane; p < kOutputs; p += 32) sum += y[p] * t.weight[c * kOutputs + p];
        sum = sum_of_warp(sum);
        if (lane == 0) scores[c] = sum + (t.bias != nullptr ? t.bias[c] : 0.0f);
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
      for (int c = lane; c < kClasses; c += 32) {
        to[c] = counts ? (expf(scores[c] - most) / sum - (c == target ? 1.0f : 0.0f)) / counted : 0.0f;
      }
      if (counts) found = logf(sum) + most - scores[target];
    } else {
      const float* const targets = static_cast<const float*>(t.targets) + (long long)i * kClasses;
      for (int c = lane; c < kClasses; c += 32) {
        const float apart = scores[c] - targets[c];
        to[c] = 2.0f * apart / counted;
        found += apart * apart;
      }
      found = sum_of_warp(found);
    }
    if (lane == 0) t.losses[i] = found;
  }
}

// The gradient of the outputs, the block's columns of its group's part of the rows.
__device__ __noinline__ void loss_of_head(const TrainingArguments& t, const BufferArgument& output_grads, int rank,
                                          int blocks, int group, int groups) {
  if constexpr (kHead) {
    const int units = (kOutputs + blocks - 1) / blocks;
    float* const to = static_cast<float*>(output_grads.data);
    for (int i = threadIdx.x; i < (t.rows - group + groups - 1) / groups * units; i += kPersistentThreads) {
      const int j = rank * units + i % units, r = i / units * groups + group;
      if (j >= kOutputs) continue;
      float sum = 0.0f;
      for (int c = 0; c < kClasses; ++c) sum += t.gradients[(long long)r * kClasses + c] * t.weight[c * kOutputs + j];
      to[row_of(t, r) * output_grads.stride + j] = sum;
    }
  }
}

__device__ __noinline__ void update_head(const TrainingArguments& t, const BufferArgument& outputs, int rank,
                                         int blocks, float counted, bool refused, const UpdateArgument& weight,
                                         const UpdateArgument& bias) {
  constexpr int kWarps = kPersistentThreads / 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (kHead && !refused) {
    const int units = (kOutputs + blocks - 1) / blocks;
    const float* const from = static_cast<const float*>(outputs.data);
    for (int k = warp; k < kClasses * units; k += kWarps) {
      const int c = k / units, j = rank * units + k % units;
      if (j >= kOutputs) continue;
      float sum = 0.0f;
#pragma unroll 4
      for (int i = lane; i < t.rows; i += 32) {
        sum += t.gradients[(long long)i * kClasses + c] * from[row_of(t, i) * outputs.stride + j];
      }
      sum = sum_of_warp(sum);
      if (lane == 0) apply(weight, c * kOutputs + j, sum);
    }
    for (int c = rank * kWarps + warp; c < kClasses; c += blocks * kWarps) {
      float sum = 0.0f;
      for (int i = lane; i < t.rows; i += 32) sum += t.gradients[(long long)i * kClasses + c];
      sum = sum_of_warp(sum);
      if (lane == 0) apply(bias, c, sum);
    }
  }
  if (rank == 0 && warp == 0) {
    float sum = 0.0f;
    for (int i = lane; i < t.rows; i += 32) sum += t.losses[i];
    sum = sum_of_warp(sum);
    if (lane == 0) {
      t.result[0] = sum / counted;
      t.result[1] = *t.refused = refused ? 1.0f : 0.0f;
    }
  }
}

}  // namespace
