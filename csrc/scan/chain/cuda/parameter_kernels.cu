// Gradients of layers' weights as products that nobody has laid out: of an output channel and a tap of an input channel
// the sum, over all samples and positions, of the gradient of the output and of the input that the tap reads there.
//
// All layers share one grid, so that the small ones fill what the large ones leave. A block of 64 threads has a tile of
// 64 output channels and 64 taps, a thread 8 x 8 of its sums in registers; eight positions at a time go through shared
// memory, in two buffers, and what comes next is read from memory while these are multiplied. The tiles of the first
// taps add up the bias, whose numbers pass by. Of a layer with few tiles and many positions these are shared out over
// several blocks; what each has found goes to memory, and a second kernel adds it in order. Layers with the longest
// blocks come first. Bound by FMAs (float32, no TF32), or, where there are few positions, by the bytes of the weights.
//
// Sums have one order on one device: two runs give the same bits.
#include "scan/chain/cuda/parameter_kernels.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "common/integers.h"
#include "common/launch.cuh"

namespace weft::scan {
namespace {

constexpr int kTile = kGradientTile, kThreads = 64, kChunk = 8;
constexpr int kOwn = kTile / kChunk;           // rows, or columns, of a thread
constexpr int kRow = kTile + 4;                // floats of a position in shared memory: a warp's writes lie apart
constexpr int kPart = kTile * kTile + kTile;   // floats of a tile's part, its bias last
constexpr int kFewest = 64, kMostParts = 256;  // positions of a block, and blocks of a tile
constexpr int kBlocks = 8;                     // of a multiprocessor, as registers allow
constexpr int kReduced = kTile * kTile / 4 / kThreads;  // blocks that add up a tile's parts; one more for the bias

struct Work {
  ParameterGradient of;
  int first, first_reduced;  // blocks of both kernels
  int rows, tiles;           // tiles of output channels, and all
  int parts, positions;      // of a tile; of a part
  float* memory;             // of the parts, kPart floats each; null: one part
};

template <int kLayers>
struct Layers {
  Work work[kLayers];
  int count;
};
// Kernels take 4 KiB of parameters without more ado, and 32,764 bytes on every device of our compilers.
constexpr int kFewLayers = 28, kManyLayers = 228;
static_assert(sizeof(Layers<kFewLayers>) <= 4000 && sizeof(Layers<kManyLayers>) <= 32000);

// The layer of a block: the last that begins at it, or before.
template <int kLayers>
__device__ __forceinline__ const Work& work_of(const Layers<kLayers>& layers, int Work::*first, int block) {
  int low = 0, high = layers.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (layers.work[middle].*first <= block ? low : high) = middle;
  }
  return layers.work[low];
}

// A sample and a position, of those that this thread reads every kChunk-th.
struct Place {
  int sample, y, x;
  int samples_on, y_on, x_on;  // to the next
  __device__ __forceinline__ Place(const ParameterGradient& l, int at) {
    const int positions = l.out[0] * l.out[1];
    sample = at / positions, y = at % positions / l.out[1], x = at % l.out[1];
    samples_on = kChunk / positions, y_on = kChunk % positions / l.out[1], x_on = kChunk % positions % l.out[1];
  }
  __device__ __forceinline__ void go_on(const ParameterGradient& l) {
    x += x_on, y += y_on, sample += samples_on;
    if (x >= l.out[1]) x -= l.out[1], ++y;
    if (y >= l.out[0]) y -= l.out[0], ++sample;
  }
};

template <int kLayers>
__global__ void __launch_bounds__(kThreads, kBlocks)
    parameter_gradients_kernel(const __grid_constant__ Layers<kLayers> layers) {
  static __shared__ __align__(16) float grads[2][kChunk][kRow], inputs[2][kChunk][kRow];
  static __shared__ uint2 taps[kTile];
  const Work& work = work_of(layers, &Work::first, int(blockIdx.x));
  const ParameterGradient& l = work.of;
  const int item = int(blockIdx.x) - work.first, part = item % work.parts, tile = item / work.parts;
  const int first_row = tile % work.rows * kTile, first_column = tile / work.rows * kTile;
  const int image = l.size[0] * l.size[1], positions = l.out[0] * l.out[1], kernel = l.kernel[0] * l.kernel[1];
  const int columns = l.inputs * kernel, total = l.batch * positions;
  const int begin = part * work.positions;
  const int end = total - begin < work.positions ? total : begin + work.positions;
  const bool sums_bias = first_column == 0 && l.bias;

  // Of the columns, without their positions: where in the input; rows << 16 | columns.
  if (const int column = first_column + int(threadIdx.x); true) {
    const int channel = column / kernel, ky = column % kernel / l.kernel[1], kx = column % kernel % l.kernel[1];
    const int y = ky * l.dilation[0] - l.padding[0], x = kx * l.dilation[1] - l.padding[1];
    const bool real = column < columns;  // else above all images
    taps[threadIdx.x] = {unsigned(channel * image + y * l.size[1] + x),
                         real ? unsigned(y) << 16 | (unsigned(x) & 0xffffu) : 0x80000000u};
  }
  __syncthreads();

  // What this thread reads: of one position in eight, eight rows and eight columns.
  const int own = threadIdx.x % kChunk, line = threadIdx.x / kChunk;
  Place place(l, begin + own);
  float grad[kOwn], input[kOwn];
  const auto read = [&](int at) {
    const bool real = at + own < end;
    const float* from = l.grad + int64_t(place.sample) * l.outputs * positions + place.y * l.out[1] + place.x;
    const int y0 = place.y * l.stride[0], x0 = place.x * l.stride[1];
    const float* image_at = l.input + int64_t(place.sample) * l.inputs * image + y0 * l.size[1] + x0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int row = first_row + line + i * kChunk;
      grad[i] = real && row < l.outputs ? from[row * positions] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const uint2 tap = taps[line + i * kChunk];
      const int y = y0 + (int(tap.y) >> 16), x = x0 + int(int16_t(tap.y & 0xffffu));
      const bool inside = real && unsigned(y) < unsigned(l.size[0]) && unsigned(x) < unsigned(l.size[1]);
      input[i] = inside ? image_at[int(tap.x)] : 0.0f;
    }
    place.go_on(l);
  };
  const auto put = [&](int buffer) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      grads[buffer][own][line + i * kChunk] = grad[i], inputs[buffer][own][line + i * kChunk] = input[i];
    }
  };

  // Rows and columns of the sums: four from `row` and `column` on, and four half a tile on.
  const int row = threadIdx.x / 8 * 4, column = threadIdx.x % 8 * 4;
  float sum[8][8] = {}, bias = 0, lost = 0;
  read(begin), put(0);
  __syncthreads();
  for (int at = begin, buffer = 0; at < end; at += kChunk, buffer ^= 1) {
    const bool more = at + kChunk < end;
    if (more) read(at + kChunk);
#pragma unroll
    for (int k = 0; k < kChunk; ++k) {
      float a[8], b[8];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4 of_grads = *reinterpret_cast<const float4*>(&grads[buffer][k][row + half * (kTile / 2)]);
        const float4 of_inputs = *reinterpret_cast<const float4*>(&inputs[buffer][k][column + half * (kTile / 2)]);
        a[4 * half] = of_grads.x, a[4 * half + 1] = of_grads.y, a[4 * half + 2] = of_grads.z;
        a[4 * half + 3] = of_grads.w;
        b[4 * half] = of_inputs.x, b[4 * half + 1] = of_inputs.y, b[4 * half + 2] = of_inputs.z;
        b[4 * half + 3] = of_inputs.w;
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) sum[i][j] += a[i] * b[j];
      }
    }
    if (sums_bias) {
      // Compensated: where all gradients are one number, every sum would be rounded the same way.
      float next = -lost;
#pragma unroll
      for (int k = 0; k < kChunk; ++k) next += grads[buffer][k][threadIdx.x];
      const float before = bias;
      bias += next, lost = (bias - before) - next;
      if (!(fabsf(bias) < INFINITY)) lost = 0;  // of an infinity it would be NaN
    }
    if (more) put(buffer ^ 1);
    __syncthreads();
  }

  float* const memory = work.memory ? work.memory + int64_t(item) * kPart : nullptr;
  if (sums_bias) {
    const int channel = first_row + int(threadIdx.x);
    if (memory) {
      memory[kTile * kTile + threadIdx.x] = bias;
    } else if (channel < l.outputs) {
      l.bias[channel] = bias;
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* four = &sum[i][4 * half];
      const int r = row + i % 4 + i / 4 * (kTile / 2), c = column + half * (kTile / 2), from = first_column + c;
      if (memory) {
        *reinterpret_cast<float4*>(memory + r * kTile + c) = {four[0], four[1], four[2], four[3]};
      } else if (first_row + r < l.outputs && from < columns) {
        float* const to = l.weight + int64_t(first_row + r) * columns + from;
        if (columns % 4 == 0) {
          *reinterpret_cast<float4*>(to) = {four[0], four[1], four[2], four[3]};
        } else {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            if (from + j < columns) to[j] = four[j];
          }
        }
      }
    }
  }
}

// Adds up the parts of tiles that have several. A thread has four numbers, the last block of a tile its bias.
template <int kLayers>
__global__ void __launch_bounds__(kThreads) add_parts_kernel(const __grid_constant__ Layers<kLayers> layers) {
  const Work& work = work_of(layers, &Work::first_reduced, int(blockIdx.x));
  const ParameterGradient& l = work.of;
  const int item = int(blockIdx.x) - work.first_reduced, share = item % (kReduced + 1), tile = item / (kReduced + 1);
  const int first_row = tile % work.rows * kTile, first_column = tile / work.rows * kTile;
  const float* const memory = work.memory + int64_t(tile) * work.parts * kPart;
  if (share == kReduced) {
    const int channel = first_row + int(threadIdx.x);
    if (!l.bias || first_column > 0 || channel >= l.outputs) return;
    float sum = 0;
    for (int p = 0; p < work.parts; ++p) sum += memory[p * kPart + kTile * kTile + threadIdx.x];
    l.bias[channel] = sum;
    return;
  }
  const int at = (share * kThreads + int(threadIdx.x)) * 4, row = first_row + at / kTile;
  const int column = first_column + at % kTile, columns = l.inputs * l.kernel[0] * l.kernel[1];
  if (row >= l.outputs || column >= columns) return;
  float sum[4] = {};
#pragma unroll 8
  for (int p = 0; p < work.parts; ++p) {
    const float4 found = *reinterpret_cast<const float4*>(memory + p * kPart + at);
    sum[0] += found.x, sum[1] += found.y, sum[2] += found.z, sum[3] += found.w;
  }
  float* const to = l.weight + int64_t(row) * columns + column;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (column + j < columns) to[j] = sum[j];
  }
}

int64_t positions_of(const ParameterGradient& l) {
  return int64_t(l.batch) * l.out[0] * l.out[1];
}

Work tiles_of(const ParameterGradient& l) {
  Work work{};
  work.of = l;
  work.rows = int(ceil_div(l.outputs, kTile));
  work.tiles = work.rows * int(ceil_div(int64_t(l.inputs) * l.kernel[0] * l.kernel[1], kTile));
  return work;
}

template <int kLayers>
void launch_layers(const Work* begin, const Work* end, cudaStream_t stream) {
  const auto layers = std::make_unique<Layers<kLayers>>();
  layers->count = int(end - begin);
  std::copy(begin, end, layers->work);
  int64_t blocks = 0;
  for (Work* w = layers->work; w < layers->work + layers->count; ++w)
    w->first = int(blocks), blocks += w->tiles * w->parts;
  launch("parameter_gradients", parameter_gradients_kernel<kLayers>, blocks, kThreads, 0, stream, *layers);
  Work* const split = std::stable_partition(layers->work, layers->work + layers->count,
                                            [](const Work& w) { return w.memory != nullptr; });
  layers->count = int(split - layers->work), blocks = 0;
  for (Work* w = layers->work; w < split; ++w) w->first_reduced = int(blocks), blocks += w->tiles * (kReduced + 1);
  if (blocks > 0) launch("add_parts", add_parts_kernel<kLayers>, blocks, kThreads, 0, stream, *layers);
}

}  // namespace

void parameter_gradients_cuda(const ParameterGradient* layers, int64_t count, const PartsMemory& memory,
                              cudaStream_t stream) {
  std::vector<Work> all;
  int64_t total = 0, floats = 0;
  for (const ParameterGradient* l = layers; l < layers + count; ++l) {
    all.push_back(tiles_of(*l)), total += all.back().tiles * positions_of(*l);
  }
  // Half of what a resident block has to do, so that blocks which end early find more.
  const int64_t share = std::max<int64_t>(kFewest, total / (2 * kBlocks * int64_t(device_limits().sm_count)));
  for (Work& w : all) {
    const int64_t positions = positions_of(w.of);
    const int64_t parts = std::clamp<int64_t>(ceil_div(positions, share), 1, kMostParts);
    w.positions = int(ceil_div(ceil_div(positions, parts), kChunk) * kChunk);
    w.parts = int(ceil_div(positions, w.positions));
    if (w.parts > 1) floats += int64_t(w.tiles) * w.parts * kPart;
  }
  float* at = floats > 0 ? memory(floats) : nullptr;
  for (Work& w : all) {
    if (w.parts > 1) w.memory = at, at += int64_t(w.tiles) * w.parts * kPart;
  }
  std::stable_sort(all.begin(), all.end(), [](const Work& a, const Work& b) { return a.positions > b.positions; });
  for (int64_t begin = 0; begin < count; begin += kManyLayers) {
    const Work *from = all.data() + begin, *to = all.data() + std::min<int64_t>(count, begin + kManyLayers);
    to - from <= kFewLayers ? launch_layers<kFewLayers>(from, to, stream)
                            : launch_layers<kManyLayers>(from, to, stream);
  }
}

}  // namespace weft::scan
