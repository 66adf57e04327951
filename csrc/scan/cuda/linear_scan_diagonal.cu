// x[t] = A[t] * x[t-1] + b[t], A diagonal: B * H independent channels, 12 bytes of fp32 traffic per element and step.
//
// Decomposition: one warp, which is one block, per slab of adjacent channels of one batch row (rows that lie end to end
//   are merged first); a lane owns kLaneBytes of the slab, 1 to 8 channels. The warp runs through t in order, so there
//   is no order that could vary and no look-back: the result is the sequential one, bit for bit in every run.
// Shared memory: a ring of kStages stages of kSteps rows of A and of b, private to the warp and filled by cp.async.
//   kStages - 1 stages, about 44 KB, are always in flight, which by Little's law carries an SM's share of the memory
//   bandwidth at 1 us of latency. No block barrier: one __syncwarp per stage.
// Registers: the state, and the kSteps elements of a stage that a lane owns.
// Cost per step and warp: two shared loads, one FMA per channel, one store, half a cp.async: 10 to 20 cycles. Memory is
//   the bound as long as there are slabs for at least half of the SMs.
//
// With fewer slabs and a long T, T is cut into chunks, at the price of a second read of A and b:
//   products    every chunk's product of A and its value from a zero state, all chunks in parallel;
//   boundaries  every chunk's start, in order, one warp per 32 channels;
//   replay      the one-pass kernel from those starts, all chunks in parallel.
// The boundaries' kernel runs a chunk again, step by step, where its total (diagonal_totals.cuh) cannot say what
// follows a state.
#include <algorithm>

#include "common/cuda/ptx.jit.cuh"
#include "common/element.cuh"
#include "common/launch.cuh"
#include "scan/cuda/diagonal_totals.cuh"
#include "scan/cuda/linear_scan.h"

namespace weft::scan {
namespace {

constexpr int kWarp = 32;

// Thresholds. The widest slab that still leaves so many slabs per SM is taken: long rows are kind to DRAM pages.
constexpr int64_t kWideSlabsPerSm = 1;
// T is cut where fewer than one in this many SMs would have a slab.
constexpr int64_t kChunkedBelow = 2;
constexpr int64_t kMinChunkedT = 4096;  // below, three launches cost more than the steps of one
constexpr int64_t kMinChunk = 256;      // steps; shorter chunks only move work into the boundaries
constexpr int64_t kChunkWarpsPerSm = 4;
constexpr int kBoundaryBatch = 12;  // chunks' products in flight per lane of the boundaries' kernel; half of it in fp64
constexpr int kRedoBatch = 16;      // steps in flight per lane when a chunk is run again

__device__ float fused(float a, float x, float b) {
  return fmaf(a, x, b);
}
__device__ double fused(double a, double x, double b) {
  return fma(a, x, b);
}

template <int kBytes>
struct Word;
template <>
struct Word<2> {
  using type = uint16_t;
};
template <>
struct Word<4> {
  using type = uint32_t;
};
template <>
struct Word<8> {
  using type = uint2;
};
template <>
struct Word<16> {
  using type = uint4;
};

// How a stage is filled: by 16-byte pieces of rows, which needs 16-byte alignment everywhere, or every lane its own
// element, which needs none.
enum class Fill { pieces, elements };

template <typename T, int kLaneBytes>
struct Shape {
  static constexpr int kChannels = kLaneBytes / int(sizeof(T));  // per lane
  static constexpr int kWidth = kWarp * kChannels;
  static constexpr int kRowBytes = kWarp * kLaneBytes;
  static constexpr int kSteps = kRowBytes <= 128 ? 16 : 8;
  static constexpr int kHalfBytes = kSteps * kRowBytes;  // A's or b's part of a stage
  static constexpr int kStages = kRowBytes <= 256 ? 12 : 6;
  static constexpr int kSharedBytes = 2 * kHalfBytes * kStages;
};

template <int kBytes>
__device__ void copy_element(unsigned char* to, const void* from) {
  if constexpr (kBytes >= 4) {
    copy_async<kBytes>(to, from);
  } else {
    // cp.async has no 2-byte form.
    *reinterpret_cast<uint16_t*>(to) = *static_cast<const uint16_t*>(from);
  }
}

// One of the two inputs, as one lane fills it.
template <typename T, int kLaneBytes, Fill kFill>
class Source {
  using S = Shape<T, kLaneBytes>;
  static constexpr int kPieces = S::kRowBytes / 16;
  static constexpr int kRowsPerCopy = kFill == Fill::pieces ? kWarp / (kPieces ? kPieces : 1) : 1;

 public:
  // `row` points at channel h0 of the first step.
  __device__ Source(const void* row, int64_t stride_t, int64_t channels_left, int lane)
      : stride_(stride_t * sizeof(T)) {
    if constexpr (kFill == Fill::pieces) {
      const int piece = lane % kPieces;
      first_row_ = lane / kPieces;
      const int64_t left = channels_left * int64_t(sizeof(T)) - piece * 16;
      bytes_ = left >= 16 ? 16 : left > 0 ? int(left) : 0;
      from_ = static_cast<const char*>(row) + first_row_ * stride_ + (bytes_ ? piece * 16 : 0);
      offset_ = first_row_ * S::kRowBytes + piece * 16;
    } else {
      first_row_ = 0;
      bytes_ = lane < channels_left ? kLaneBytes : 0;
      from_ = static_cast<const char*>(row) + (bytes_ ? lane * kLaneBytes : 0);
      offset_ = lane * kLaneBytes;
    }
  }

  // Fills `half` with the next kSteps rows, of which `steps_left` exist.
  __device__ void fill(unsigned char* half, int64_t steps_left) {
    const char* from = from_;
#pragma unroll
    for (int r = 0; r < S::kSteps; r += kRowsPerCopy) {
      if (r + first_row_ < steps_left) {
        unsigned char* to = half + r * S::kRowBytes + offset_;
        if constexpr (kFill == Fill::pieces) {
          copy_async_padded(to, from, bytes_);
        } else if (bytes_) {
          copy_element<kLaneBytes>(to, from);
        }
      }
      from += kRowsPerCopy * stride_;
    }
    from_ = from;
  }

 private:
  const char* from_;
  int64_t stride_;
  int first_row_, bytes_, offset_;
};

// What the chunks leave for each other: (chunk, channel), channel fastest.
struct Chunks {
  int64_t count, length;  // chunks, steps in each but the last
  void* mantissa;         // Wide, count - 1 chunks
  void* value;            // Wide
  double* magnitude;      // what value would be if every a and b were positive: a bound of all terms it is made of
  int64_t* exponent;
  void* start;  // in the accumulation dtype, count chunks; null where T is one chunk
};

// The products of every chunk but the last, or the scan itself.
template <typename T, int kLaneBytes, Fill kFill, bool kProducts>
__global__ void __launch_bounds__(kWarp) scan_kernel(LinearScan s, int64_t slabs_per_row, Chunks chunks) {
  using S = Shape<T, kLaneBytes>;
  using Acc = State<T>;
  using Packed = typename Word<kLaneBytes>::type;
  constexpr int kChannels = S::kChannels, kSteps = S::kSteps, kStages = S::kStages;
  extern __shared__ __align__(128) unsigned char ring[];

  const int lane = threadIdx.x;
  const int64_t row = blockIdx.x / slabs_per_row, h0 = (blockIdx.x % slabs_per_row) * S::kWidth;
  const int64_t first = blockIdx.y * chunks.length;
  const int64_t steps = min(chunks.length, s.T - first);
  const int64_t h = h0 + lane * kChannels;  // the lane's first channel
  const int owned = int(max(int64_t(0), min(int64_t(kChannels), s.H - h)));
  const int64_t channels = s.B * s.H, slot = blockIdx.y * channels + row * s.H + h;

  const T* A = static_cast<const T*>(s.A) + first * s.A_t + row * s.A_b + h0;
  const T* b = static_cast<const T*>(s.b) + first * s.b_t + row * s.b_b + h0;
  Source<T, kLaneBytes, kFill> from_A(A, s.A_t, s.H - h0, lane), from_b(b, s.b_t, s.H - h0, lane);
  const int64_t stages = (steps + kSteps - 1) / kSteps;
  auto fill = [&](int64_t stage, int place) {
    if (stage < stages) {
      unsigned char* at = ring + place * (2 * S::kHalfBytes);
      from_A.fill(at, steps - stage * kSteps);
      from_b.fill(at + S::kHalfBytes, steps - stage * kSteps);
    }
    // An empty group keeps the count of groups equal to the count of stages.
    copy_commit();
  };
  for (int i = 0; i < kStages - 1; ++i) fill(i, i);

  // With no x0 the first A is not used, whatever it holds: a zero in its place leaves b.
  const bool no_start = first == 0 && s.x0 == nullptr;
  Acc x[kChannels];
  Wide<Acc> value[kChannels];
  double magnitude[kChannels];
  Product<Acc> product[kChannels];
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    x[c] = 0;
    value[c] = {0};
    magnitude[c] = 0;
    if (!kProducts && c < owned) {
      if (chunks.start != nullptr) {
        x[c] = static_cast<const Acc*>(chunks.start)[slot + c];
      } else if (s.x0 != nullptr) {
        x[c] = to_state(static_cast<const T*>(s.x0)[row * s.x0_b + h + c]);
      }
    }
  }

  T* out = static_cast<T*>(s.out) + first * s.out_t + row * s.out_b + h;
  auto step = [&](int i, Packed packed_a, Packed packed_b, bool skip) {
    alignas(kLaneBytes) T a[kChannels], v[kChannels];
    *reinterpret_cast<Packed*>(a) = packed_a;
    *reinterpret_cast<Packed*>(v) = packed_b;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      const Acc factor = skip ? Acc(0) : to_state(a[c]);
      if constexpr (kProducts) {
        const Acc offset = to_state(v[c]);
        value[c] = multiply_add(factor, value[c], offset);
        magnitude[c] = fma(fabs(double(factor)), magnitude[c], fabs(double(offset)));
        product[c].multiply(factor);
        if (i % kFactorsPerNormalise == kFactorsPerNormalise - 1) product[c].normalise();
      } else {
        x[c] = fused(factor, x[c], to_state(v[c]));
        v[c] = from_state<T>(x[c]);
      }
    }
    if constexpr (!kProducts) {
      if (owned == kChannels) {
        *reinterpret_cast<Packed*>(out) = *reinterpret_cast<const Packed*>(v);
      } else {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          if (c < owned) out[c] = v[c];
        }
      }
      out += s.out_t;
    }
  };

  int place = 0;
  for (int64_t stage = 0; stage < stages; ++stage) {
    copy_wait<kStages - 2>();
    // Makes the copies of the other lanes visible, and says that all lanes are done with the place filled next.
    __syncwarp();
    fill(stage + kStages - 1, place == 0 ? kStages - 1 : place - 1);
    const unsigned char* at = ring + place * (2 * S::kHalfBytes) + lane * kLaneBytes;
    auto read = [&](int half, int i) {
      return *reinterpret_cast<const Packed*>(at + half * S::kHalfBytes + i * S::kRowBytes);
    };
    const int64_t left = steps - stage * kSteps;
    const bool skip = no_start && stage == 0;
    if (left >= kSteps) {
      Packed packed_a[kSteps], packed_b[kSteps];
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        packed_a[i] = read(0, i);
        packed_b[i] = read(1, i);
      }
#pragma unroll
      for (int i = 0; i < kSteps; ++i) step(i, packed_a[i], packed_b[i], skip && i == 0);
    } else {
      for (int i = 0; i < int(left); ++i) step(i, read(0, i), read(1, i), skip && i == 0);
    }
    place = place + 1 == kStages ? 0 : place + 1;
  }

  if constexpr (kProducts) {
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      if (c >= owned) continue;
      product[c].normalise();
      static_cast<Wide<Acc>*>(chunks.mantissa)[slot + c] = product[c].m;
      static_cast<Wide<Acc>*>(chunks.value)[slot + c] = value[c];
      chunks.magnitude[slot + c] = magnitude[c];
      chunks.exponent[slot + c] = product[c].e;
    }
  }
}

// The state after `steps` steps from x, one channel per lane, straight from global memory. Not inlined: the boundaries'
// own registers are worth more than the call, which is rare.
template <typename T>
__device__ __noinline__ State<T> redo(const T* A, int64_t A_t, const T* b, int64_t b_t, int64_t steps, bool no_start,
                                      State<T> x) {
  using Acc = State<T>;
  for (int64_t t = 0; t < steps; t += kRedoBatch) {
    Acc a[kRedoBatch], v[kRedoBatch];
#pragma unroll
    for (int i = 0; i < kRedoBatch; ++i) {
      const bool exists = t + i < steps;
      a[i] = exists && !(no_start && t + i == 0) ? to_state(A[(t + i) * A_t]) : Acc(0);
      v[i] = exists ? to_state(b[(t + i) * b_t]) : Acc(0);
    }
#pragma unroll
    for (int i = 0; i < kRedoBatch; ++i) {
      if (t + i < steps) x = fused(a[i], x, v[i]);
    }
  }
  return x;
}

// The start of every chunk, from the products, in order. One lane per channel.
template <typename T>
__global__ void __launch_bounds__(kWarp) boundaries_kernel(LinearScan s, Chunks chunks) {
  using Acc = State<T>;
  const int64_t channels = s.B * s.H, channel = int64_t(blockIdx.x) * kWarp + threadIdx.x;
  if (channel >= channels) return;
  const int64_t row = channel / s.H, h = channel % s.H;
  const T* A = static_cast<const T*>(s.A) + row * s.A_b + h;
  const T* b = static_cast<const T*>(s.b) + row * s.b_b + h;
  Acc* start = static_cast<Acc*>(chunks.start) + channel;
  Acc x = s.x0 ? to_state(static_cast<const T*>(s.x0)[row * s.x0_b + h]) : Acc(0);
  start[0] = x;
  // Every step of a chunk rounds once, and so does the sum of product and value.
  const double lost = double(chunks.length + 2) * exp2(Kept<Acc>::kDigits - Wide<Acc>::kDigits);
  constexpr int kBatch = kBoundaryBatch * 4 / int(sizeof(Acc));
  for (int64_t k0 = 0; k0 < chunks.count - 1; k0 += kBatch) {
    Product<Acc> product[kBatch];
    Wide<Acc> value[kBatch];
    double magnitude[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (k0 + i < chunks.count - 1) {
        const int64_t at = (k0 + i) * channels + channel;
        product[i].m = static_cast<const Wide<Acc>*>(chunks.mantissa)[at];
        product[i].e = chunks.exponent[at];
        value[i] = static_cast<const Wide<Acc>*>(chunks.value)[at];
        magnitude[i] = chunks.magnitude[at];
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int64_t k = k0 + i;
      if (k < chunks.count - 1) {
        const Wide<Acc> moved = product[i].apply(x);
        const double total = sum(moved, value[i]).hi;
        Acc next = Acc(total);
        const bool digits_left =
            (fabs(moved.hi) + magnitude[i]) * lost <= fmax(fabs(total), Kept<Acc>::kLeast);  // not with a NaN
        // Once a channel is not finite it stays so, and nothing is left to save.
        if (!(digits_left && isfinite(next)) && isfinite(x)) {
          next = redo<T>(A + k * chunks.length * s.A_t, s.A_t, b + k * chunks.length * s.b_t, s.b_t, chunks.length,
                         k == 0 && s.x0 == nullptr, x);
        }
        x = next;
        start[(k + 1) * channels] = x;
      }
    }
  }
}

struct Plan {
  LinearScan scan;  // batch rows merged where they lie end to end
  bool pieces;
  int lane_bytes;
  int64_t slabs_per_row, slabs, chunk, chunks;
};

Plan make_plan(const LinearScan& scan) {
  Plan p{scan, false, 0, 0, 0, 0, 1};
  LinearScan& s = p.scan;
  if (s.B == 1 || (s.A_b == s.H && s.b_b == s.H && s.out_b == s.H && (!s.x0 || s.x0_b == s.H))) {
    s.H *= s.B;
    s.B = 1;
    s.A_b = s.b_b = s.out_b = s.x0_b = s.H;
  }
  const int64_t size = int64_t(element_size(s.dtype));
  auto aligned = [&](const void* base, int64_t stride_t, int64_t stride_b) {
    return reinterpret_cast<uintptr_t>(base) % 16 == 0 && (s.T == 1 || stride_t * size % 16 == 0) &&
           (s.B == 1 || stride_b * size % 16 == 0);
  };
  p.pieces = aligned(s.A, s.A_t, s.A_b) && aligned(s.b, s.b_t, s.b_b) && aligned(s.out, s.out_t, s.out_b);
  const int64_t sms = device_limits().sm_count;
  auto cut = [&](int lane_bytes) {
    const int64_t width = kWarp * lane_bytes / size;
    p.lane_bytes = lane_bytes;
    p.slabs_per_row = (s.H + width - 1) / width;
    p.slabs = p.slabs_per_row * s.B;
  };
  if (!p.pieces) {
    cut(int(size));
  } else {
    cut(16);
    if (p.slabs < kWideSlabsPerSm * sms) cut(8);
    if (p.slabs < kWideSlabsPerSm * sms && size < 8) cut(4);
  }
  p.chunk = s.T;
  if (kChunkedBelow * p.slabs < sms && s.T >= kMinChunkedT) {
    const int64_t wanted = std::max<int64_t>(1, kChunkWarpsPerSm * sms / p.slabs);
    p.chunk = std::max(kMinChunk, (s.T + wanted - 1) / wanted);
    p.chunks = (s.T + p.chunk - 1) / p.chunk;
    if (p.chunks == 1) p.chunk = s.T;
  }
  return p;
}

size_t workspace_bytes(const Plan& p) {
  // Mantissa, value, magnitude, exponent; the starts take 8 bytes each for any dtype.
  const int64_t words = p.scan.dtype == DType::f64 ? 6 : 4;
  return size_t(8 * p.scan.B * p.scan.H * (words * (p.chunks - 1) + p.chunks));
}

template <typename T, int kLaneBytes, Fill kFill>
void launch_scan(const Plan& p, const Chunks& chunks, cudaStream_t stream) {
  const dim3 grid(unsigned(p.slabs), unsigned(p.chunks));
  launch("linear_scan_diagonal", scan_kernel<T, kLaneBytes, kFill, false>, grid, dim3(kWarp),
         Shape<T, kLaneBytes>::kSharedBytes, stream, p.scan, p.slabs_per_row, chunks);
}

template <typename T, int kLaneBytes, Fill kFill>
void launch_all(const Plan& p, const Chunks& chunks, cudaStream_t stream) {
  if (p.chunks > 1) {
    launch("linear_scan_diagonal_products", scan_kernel<T, kLaneBytes, kFill, true>,
           dim3(unsigned(p.slabs), unsigned(p.chunks - 1)), dim3(kWarp), Shape<T, kLaneBytes>::kSharedBytes, stream,
           p.scan, p.slabs_per_row, chunks);
    launch("linear_scan_diagonal_boundaries", boundaries_kernel<T>,
           dim3(unsigned((p.scan.B * p.scan.H + kWarp - 1) / kWarp)), dim3(kWarp), 0, stream, p.scan, chunks);
  }
  launch_scan<T, kLaneBytes, kFill>(p, chunks, stream);
}

template <typename T>
void run(const Plan& p, const Chunks& chunks, cudaStream_t stream) {
  // Wide slabs are taken only where there are enough of them, and then T is one chunk.
  constexpr int kNarrow = sizeof(T) == 8 ? 8 : 4;
  if (!p.pieces) {
    launch_all<T, int(sizeof(T)), Fill::elements>(p, chunks, stream);
  } else if (p.lane_bytes == 16) {
    launch_scan<T, 16, Fill::pieces>(p, chunks, stream);
  } else if (p.lane_bytes == 8 && kNarrow != 8) {
    launch_scan<T, 8, Fill::pieces>(p, chunks, stream);
  } else {
    launch_all<T, kNarrow, Fill::pieces>(p, chunks, stream);
  }
}

}  // namespace

void linear_scan_diagonal(const LinearScan& scan, const Workspace& workspace, cudaStream_t stream) {
  if (scan.T == 0 || scan.B == 0 || scan.H == 0) return;
  const Plan p = make_plan(scan);
  Chunks chunks{p.chunks, p.chunk, nullptr, nullptr, nullptr, nullptr, nullptr};
  if (p.chunks > 1) {
    const int64_t products = (p.chunks - 1) * p.scan.B * p.scan.H;
    const int64_t wide = scan.dtype == DType::f64 ? 2 : 1;
    auto* words = static_cast<double*>(workspace(workspace_bytes(p)));
    chunks.mantissa = words;
    chunks.value = words + wide * products;
    chunks.magnitude = words + 2 * wide * products;
    chunks.exponent = reinterpret_cast<int64_t*>(chunks.magnitude + products);
    chunks.start = chunks.exponent + products;
  }
  switch (scan.dtype) {
    case DType::f16:
      return run<__half>(p, chunks, stream);
    case DType::bf16:
      return run<__nv_bfloat16>(p, chunks, stream);
    case DType::f32:
      return run<float>(p, chunks, stream);
    case DType::f64:
      return run<double>(p, chunks, stream);
  }
}

}  // namespace weft::scan
