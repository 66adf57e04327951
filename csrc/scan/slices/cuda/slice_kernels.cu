// Slices of a diagonal scan on CUDA.
//
// Floor: the product reads A, the mending A and x, and writes x; with gradients it reads the x before, too, and writes
// grad_A. All as far only as the product of A still shows in a float: where A forgets, a few hundred steps of a
// slice, which cost a few microseconds; where it does not, all bytes of the slice once more.
//
// Decomposition: a block has 32 adjacent channels of a batch row, its warps consecutive pieces of kSteps steps, whose
//   loads are all on their way at once. Of the product every block has a piece of time of its own, where channels are
//   few; a second kernel multiplies these. Mending is in tiles of time: warps tell each other the products of their
//   pieces, and each walks its own from the state that so comes in. What tiles add to a channel never leaves registers.
// Numbers: a piece's product and steps in the dtype, what pieces hand on in double. A product that leaves the middle of
// its range is not trusted: the lane walks from the
//   tile's begin, step by step, as the scan itself would.
#include <cuda_bf16.h>

#include <algorithm>
#include <type_traits>

#include "common/cuda/ptx.jit.cuh"
#include "common/element.cuh"
#include "common/integers.h"
#include "common/launch.cuh"
#include "scan/slices/cuda/mend_walk.h"
#include "scan/slices/cuda/slice_kernels.h"
#include "scan/slices/slice_told.h"

namespace weft::scan {
namespace {

constexpr int kLanes = 32, kManyWarps = 32, kFewWarps = 8, kRowThreads = 256, kMostRowThreads = 1024;
// Of a row's states that lie in shared memory.
constexpr int64_t kNearStates = 512;
// Of a warp between two meetings, as many as there are registers for.
template <typename T, int kWarps = kFewWarps>
constexpr int kSteps = sizeof(T) == 8 || kWarps == kManyWarps ? 8 : 16;
// Of a warp between two looks whether the product is zero.
constexpr int kProductSteps = 32;

// Into `parts`, or where the piece of time is the only one into the message.
template <typename S, typename T = acc_t<S>>
__global__ void __launch_bounds__(kLanes* kFewWarps)
    product_kernel(const __grid_constant__ SliceProduct p, int64_t steps, Scaled* parts, const T* value, bool leaves,
                   typename Packed<T>::Number* message) {
  __shared__ double mantissas[kFewWarps][kLanes];
  __shared__ int64_t exponents[kFewWarps][kLanes], looks[2][kFewWarps][kLanes];
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  const int64_t slabs = ceil_div(p.H, int64_t(kLanes));
  const int64_t row = blockIdx.x / slabs, h = blockIdx.x % slabs * kLanes + lane;
  const bool owned = h < p.H;
  const int64_t begin = blockIdx.y * steps, end = min(begin + steps, p.T);
  const S* const A = static_cast<const S*>(p.A) + row * p.A_b + (owned ? h : 0);
  Scaled product;
  // Warps take turns, and look together whether the rest still matters.
  int turn = 0;
  for (int64_t tile = begin; tile < end; tile += kFewWarps * kProductSteps, turn ^= 1) {
    const int64_t first = tile + warp * kProductSteps;
#pragma unroll 1
    for (int64_t from = first; from < min(first + kProductSteps, end); from += kSteps<T>) {
      T a[kSteps<T>];
#pragma unroll
      for (int i = 0; i < kSteps<T>; ++i) a[i] = from + i < end ? T(to_acc(A[(from + i) * p.A_t])) : T(1);
#pragma unroll
      for (int i = 0; i < kSteps<T>; ++i) {
        product.multiply(a[i]);
        if ((i + 1) % kFactors == 0) product.rescale_if_far();
      }
    }
    looks[turn][warp][lane] = product.exponent();
    __syncthreads();
    int64_t exponent = 0;
#pragma unroll
    for (int w = 0; w < kFewWarps; ++w) exponent += looks[turn][w][lane];
    if (!__any_sync(~0u, owned && exponent >= kProductIsZero<T>)) break;
  }
  mantissas[warp][lane] = product.m, exponents[warp][lane] = product.e;
  __syncthreads();
  if (warp != 0 || !owned) return;
  for (int w = 1; w < kFewWarps; ++w) product.multiply(Scaled{mantissas[w][lane], exponents[w][lane]});
  const int64_t channel = row * p.H + h;
  if (gridDim.y == 1) return tell<T>(product, value[channel], leaves, channel, p.B * p.H, message);
  parts[(blockIdx.y * p.B + row) * p.H + h] = product;
}

template <typename T>
__global__ void __launch_bounds__(128) message_kernel(const Scaled* parts, int64_t count, int64_t channels,
                                                      const T* value, bool leaves, typename Packed<T>::Number* to) {
  const int64_t channel = blockIdx.x * 128ll + threadIdx.x;
  if (channel == 0 && channels == 0) to[0] = leaves;
  if (channel >= channels) return;
  Scaled product;
#pragma unroll 4
  for (int64_t i = 0; i < count; ++i) product.multiply(parts[i * channels + channel]);
  tell<T>(product, value[channel], leaves, channel, channels, to);
}

template <typename T>
__global__ void __launch_bounds__(128) states_kernel(const __grid_constant__ SliceStates s) {
  const int64_t channel = blockIdx.x * 128ll + threadIdx.x;
  if (channel < s.B * s.H) carry_between_slices<T>(s, channel);
}

template <typename T>
__global__ void __launch_bounds__(128) gradients_kernel(const __grid_constant__ SliceGradients s) {
  const int64_t channel = blockIdx.x * 128ll + threadIdx.x;
  if (channel < s.B * s.H) carry_back_between_slices<T>(s, channel);
}

// A batch row of a dense scan, by a block. A warp takes a row of a rank's product, all of them at once where there are
// warps enough; the first batch row writes a product that all share. `states` has those of all rows, where a row's do
// not lie in shared memory.
template <typename T>
__global__ void __launch_bounds__(kMostRowThreads)
    row_states_kernel(const __grid_constant__ SliceStates s, double* states) {
  using Number = typename Packed<T>::Number;
  const int64_t row = blockIdx.x, H = s.H, numbers = s.product_numbers(), of_row = s.matrices > 1 ? row * H * H : 0;
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  const bool writes = s.matrices > 1 || row == 0;
  double* state = states ? states + row * 2 * H : reinterpret_cast<double*>(dynamic_shared_memory());
  double* next = state + H;
  for (int64_t h = threadIdx.x; h < H; h += blockDim.x) {
    double sum = 0;
    for (int64_t i = 0; s.shares && i < s.ranks; ++i) {
      T share;
      memcpy(&share, s.message<Number>(i) + numbers + (s.B + row) * H + 1 + h, sizeof(T));
      sum += double(share);
    }
    state[h] = sum;
  }
  __syncthreads();
  bool came = s.shares;
  for (int64_t i = 0; i < s.ranks; ++i) {
    const Number* const message = s.message<Number>(i);
    if (i == s.order) {
      for (int64_t h = threadIdx.x; h < H; h += blockDim.x) static_cast<T*>(s.entered)[row * H + h] = T(state[h]);
      if (row == 0 && threadIdx.x == 0) *s.came = came;
    }
    for (int64_t r = warp; r < H; r += blockDim.x / kLanes) {
      double sum = 0;
      for (int64_t c = lane; c < H; c += kLanes) {
        const double product = came ? unpack_product<T>(message[of_row + r * H + c]) : 0.0;
        if (writes) s.products[i * numbers + of_row + r * H + c] = product;
        if (came) sum += product * state[c];
      }
      for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
      T value;
      memcpy(&value, message + numbers + row * H + r, sizeof(T));
      if (lane == 0) next[r] = sum + double(value);
    }
    __syncthreads();
    double* const other = state;
    state = next, next = other;
    came = came || message[numbers + s.B * H] != 0;
  }
  for (int64_t h = threadIdx.x; h < H; h += blockDim.x) static_cast<T*>(s.end)[row * H + h] = T(state[h]);
}

// The way back. Threads share a column where there are fewer of these.
template <typename T>
__global__ void __launch_bounds__(kRowThreads)
    row_gradients_kernel(const __grid_constant__ SliceGradients s, double* states) {
  __shared__ double sums[kRowThreads];
  const int64_t row = blockIdx.x, H = s.H, of_row = s.matrices > 1 ? row * H * H : 0;
  const int64_t columns = H < kRowThreads ? H : kRowThreads, groups = kRowThreads / columns;
  const int64_t first = threadIdx.x % columns, group = threadIdx.x / columns;
  double *state = states + row * 2 * H, *next = state + H;
  for (int64_t h = threadIdx.x; h < H; h += kRowThreads) {
    double share = 0;
    for (int64_t i = 0; s.shares && i < s.ranks; ++i) share += double(s.message<T>(i)[(s.B + row) * H + h]);
    state[h] = share;
  }
  __syncthreads();
  for (int64_t i = s.ranks - 1; i > s.order; --i) {
    const double* const products = s.products + i * s.matrices * H * H + of_row;
    for (int64_t begin = 0; begin < H; begin += columns) {
      const int64_t c = begin + first;
      double sum = 0;
      if (c < H && group < groups && s.enters(i)) {
        for (int64_t r = group; r < H; r += groups) sum += products[r * H + c] * state[r];
      }
      sums[threadIdx.x] = sum;
      __syncthreads();
      if (group == 0 && c < H) {
        for (int64_t g = 1; g < groups; ++g) sum += sums[g * columns + first];
        next[c] = sum + double(s.message<T>(i)[row * H + c]);
      }
      __syncthreads();
    }
    double* const other = state;
    state = next, next = other;
  }
  for (int64_t h = threadIdx.x; h < H; h += kRowThreads) static_cast<T*>(s.left)[row * H + h] = T(state[h]);
}

// Whether a product, of one factor in the middle of the range, is as good as the steps.
template <typename T>
__device__ inline bool is_trusted(T product, bool zero) {
  constexpr T far = sizeof(T) == 8 ? T(0x1p400) : T(0x1p100f);
  const T size = product < 0 ? -product : product;
  return (size > 1 / far && size < far) || (zero && product == 0);
}

template <typename S, bool kGradients, int kWarps>
__global__ void __launch_bounds__(kLanes* kWarps)
    mend_kernel(const __grid_constant__ SliceMend m, const __grid_constant__ Between<kGradients> between) {
  using T = acc_t<S>;
  using Number = typename Packed<T>::Number;
  __shared__ double products[kWarps][kLanes];
  __shared__ bool zeros[kWarps][kLanes];
  __shared__ bool shows[2][kLanes];  // whether a channel's state still does, at the end of a tile
  constexpr int kPiece = kSteps<T, kWarps>, kTile = kWarps * kPiece;
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  const int64_t slabs = ceil_div(m.H, int64_t(kLanes));
  const int64_t row = blockIdx.x / slabs, h = blockIdx.x % slabs * kLanes + lane;
  const bool owned = h < m.H;
  const int64_t at = owned ? h : 0, channel = row * m.H + at;
  if (between.messages != nullptr) {
    if (warp == 0 && owned) {
      if constexpr (kGradients) {
        carry_back_between_slices<T>(between, channel);
      } else {
        carry_between_slices<T>(between, channel);
      }
    }
    bool comes = kGradients;
    if constexpr (!kGradients) {
      const int64_t flag = slice_message_numbers(m.B * m.H, m.B * m.H) - 1;
      for (int64_t i = 0; i < between.order; ++i) comes |= between.template message<Number>(i)[flag] != 0;
    }
    __syncthreads();
    if (!comes) return;
  } else if (m.came != nullptr && *m.came == 0) {
    return;
  }
  const S* const A = static_cast<const S*>(m.A) + row * m.A_b + at;
  S* const x = static_cast<S*>(m.x) + row * m.x_b + at;
  const S* const before = static_cast<const S*>(m.before) + row * m.before_b + at;
  S* const grad_A = static_cast<S*>(m.grad_A) + row * m.grad_A_b + at;
  const bool of_A = kGradients && m.grad_A != nullptr;
  // What the step's factor is: in a scan A of the step, before it; in its gradients after it, but not of the last.
  const int64_t factors = kGradients ? m.T - 1 : m.T;
  double carry = owned ? double(static_cast<const T*>(m.state)[channel]) : 0.0;

  bool live = owned;  // whether the state still shows
  int turn = 0;
  for (int64_t tile = 0; tile < m.T; tile += kTile, turn ^= 1) {
    const int64_t begin = tile + warp * kPiece;
    T a[kPiece], value[kPiece], other[kPiece];
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      const int64_t t = begin + i;
      a[i] = t < factors ? T(to_acc(A[t * m.A_t])) : T(1);
      value[i] = t < m.T ? T(to_acc(x[t * m.x_t])) : T(0);
      if constexpr (kGradients) {
        other[i] = T(0);
        if (of_A && t < m.T) {
          if (t < m.T - 1) {
            other[i] = to_acc(before[t * m.before_t]);
          } else if (m.first != nullptr) {
            other[i] = static_cast<const T*>(m.first)[row * m.H + at];
          }
        }
      }
    }
    T product = 1;
    bool trusted = true, zero = false;
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      zero |= a[i] == T(0);
      product *= a[i];
      trusted &= is_trusted(product, zero);
    }
    products[warp][lane] = trusted ? double(product) : nan("");
    zeros[warp][lane] = zero;
    if (warp == 0) shows[turn][lane] = false;
    __syncthreads();
    // The state at the begin of this warp's piece, and of the next tile.
    double v = carry, next = carry;
    bool walked = false;
    zero = next == 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w == warp) v = next;
      next *= products[w][lane];
      zero |= zeros[w][lane];
      walked |= !(is_trusted(next, zero));
    }
    if (walked) {
      next = carry;
      for (int64_t t = tile; t < min(tile + kTile, m.T); ++t) {
        if (t == begin) v = next;
        if (t < factors) next *= double(to_acc(A[t * m.A_t]));
      }
    }
    // A float's scan would long have made zero of it.
    carry = sizeof(T) == 4 && next > -0x1p-200 && next < 0x1p-200 ? 0.0 : next;

    bool matters = false;
    T added = T(v);
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      const int64_t t = begin + i;
      if constexpr (!kGradients) added *= a[i];
      const T mended = value[i] + added;
      // Of the tile's last step, or the slice's.
      if (t == tile + kTile - 1) matters = live && !(mended == value[i] || value[i] != value[i]);
      if (live && t < m.T) {
        const S rounded = from_acc<S>(mended);
        x[t * m.x_t] = rounded;
        // Without a state before the first step its A has no gradient, also where lambda is not finite. Of a narrower
        // type it was made of lambda as it was before it was rounded: it stays where lambda does.
        const bool changes = sizeof(S) == sizeof(T) || !(to_acc(rounded) == value[i]);
        if (of_A && changes && (t < m.T - 1 || m.first != nullptr)) {
          grad_A[t * m.grad_A_t] = from_acc<S>(mended * other[i]);
        }
      }
      if constexpr (kGradients) added *= a[i];
    }
    if (matters) shows[turn][lane] = true;
    __syncthreads();
    // A channel ends by itself, whatever its neighbours do: no row of the batch shows in another.
    live = shows[turn][lane];
    if (!__any_sync(~0u, shows[turn][lane])) return;
  }
}

template <typename Run>
void with_type(bool wide, const Run& run) {
  wide ? run(double()) : run(float());
}
template <typename Run>
void with_steps(DType dtype, const Run& run) {
  if (dtype == DType::bf16) return run(static_cast<__nv_bfloat16*>(nullptr));
  dtype == DType::f64 ? run(static_cast<double*>(nullptr)) : run(static_cast<float*>(nullptr));
}

}  // namespace

void slice_message_cuda(const SliceProduct& p, const void* value, bool leaves, void* message,
                        const Workspace& workspace, cudaStream_t stream) {
  const int64_t channels = p.B * p.H, slabs = p.B * ceil_div(p.H, int64_t(kLanes));
  // Blocks enough to keep the memory busy; one piece of time needs no second kernel.
  const int64_t sms = device_limits().sm_count;
  const int64_t wanted = slabs >= 2 * sms ? 1 : ceil_div(4 * sms, std::max<int64_t>(slabs, 1));
  const int64_t least = kFewWarps * kProductSteps;
  const int64_t chunks = p.T == 0 ? 0 : std::max<int64_t>(1, std::min({wanted, ceil_div(p.T, least), int64_t(65535)}));
  const int64_t steps = chunks == 0 ? 0 : ceil_div(ceil_div(p.T, chunks), least) * least;
  const int64_t parts = chunks == 0 ? 0 : ceil_div(p.T, steps);
  const bool one = parts == 1 && channels > 0;
  Scaled* const to =
      one ? nullptr : static_cast<Scaled*>(workspace(size_t(std::max<int64_t>(1, parts * channels)) * sizeof(Scaled)));
  with_steps(p.dtype, [&]<typename S>(S*) {
    using T = acc_t<S>;
    using Number = typename Packed<T>::Number;
    launch("slice_product", product_kernel<S>, Grid(slabs, parts), kLanes * kFewWarps, 0, stream, p, steps, to,
           static_cast<const T*>(value), leaves, static_cast<Number*>(message));
    if (one) return;
    launch("slice_message", message_kernel<T>, Grid(std::max<int64_t>(1, ceil_div(channels, int64_t(128)))), 128, 0,
           stream, static_cast<const Scaled*>(to), parts, channels, static_cast<const T*>(value), leaves,
           static_cast<Number*>(message));
  });
}

void slice_states_cuda(const SliceStates& s, const Workspace& workspace, cudaStream_t stream) {
  with_type(s.wide, [&](auto zero) {
    using T = decltype(zero);
    if (s.matrices > 0) {
      const bool near = 2 * s.H <= kNearStates;
      const size_t of_row = size_t(2 * s.H) * sizeof(double);
      double* const states = near ? nullptr : static_cast<double*>(workspace(size_t(s.B) * of_row));
      const int threads = int(std::clamp<int64_t>(s.H * kLanes, kRowThreads, kMostRowThreads));
      return launch("slice_states", row_states_kernel<T>, Grid(s.B), threads, near ? of_row : 0, stream, s, states);
    }
    launch("slice_states", states_kernel<T>, Grid(ceil_div(s.B * s.H, int64_t(128))), 128, 0, stream, s);
  });
}

void slice_gradients_cuda(const SliceGradients& s, const Workspace& workspace, cudaStream_t stream) {
  with_type(s.wide, [&](auto zero) {
    using T = decltype(zero);
    if (s.matrices > 0) {
      double* const states = static_cast<double*>(workspace(size_t(2 * s.B * s.H) * sizeof(double)));
      return launch("slice_left", row_gradients_kernel<T>, Grid(s.B), kRowThreads, 0, stream, s, states);
    }
    launch("slice_left", gradients_kernel<T>, Grid(ceil_div(s.B * s.H, int64_t(128))), 128, 0, stream, s);
  });
}

namespace {

// States or gradients between slices, without messages where m.state is what comes in.
void mend(const SliceMend& m, const SliceStates& states, const SliceGradients& gradients, cudaStream_t stream) {
  if (mend_by_walk(m, states, gradients, stream)) return;
  const int64_t slabs = m.B * ceil_div(m.H, int64_t(kLanes));
  auto run = [&](const char* name, auto kernel, int warps, const auto& between) {
    launch(name, kernel, Grid(slabs), kLanes * warps, 0, stream, m, between);
  };
  with_steps(m.dtype, [&]<typename S>(S*) {
    if (m.gradients) return run("slice_mend_gradients", mend_kernel<S, true, kFewWarps>, kFewWarps, gradients);
    if constexpr (sizeof(S) <= 4) {
      // A block of doubles would not have the registers.
      const bool alone = slabs < 2 * int64_t(device_limits().sm_count);
      if (alone) return run("slice_mend", mend_kernel<S, false, kManyWarps>, kManyWarps, states);
    }
    run("slice_mend", mend_kernel<S, false, kFewWarps>, kFewWarps, states);
  });
}

}  // namespace

void slice_mend_cuda(const SliceMend& m, cudaStream_t stream) {
  mend(m, {}, {}, stream);
}

void slice_finish_cuda(SliceMend m, const SliceStates& states, cudaStream_t stream) {
  m.state = states.entered;
  mend(m, states, {}, stream);
}

void slice_finish_gradients_cuda(SliceMend m, const SliceGradients& gradients, cudaStream_t stream) {
  m.state = gradients.left;
  mend(m, {}, gradients, stream);
}

}  // namespace weft::scan
