// Gradients of h[t] = step(h[t-1], x[t], p): carry[t] = (grad[t+1] + carry[t+1]) J[t+1] from the last step to the
// first, and on the way the gradients of inputs and parameters, with the derivatives of the step computed again.
//   WEFT_CHUNKED       whether there are chunks of time
//   WEFT_GRADS         bits: the states that have a gradient
//   WEFT_WANTED        bits: the operands whose gradient is asked for, as in PointwiseArgs::results
//   WEFT_VJP           statements: g[S + I + P], the gradients of h[S], x[I] and p[P], where d[S] are those of the
//   states
//                      after the step
//   WEFT_VJP_JACOBIAN  statements: the same, and jacobian[S * S]
// and those of pointwise.jit.cuh.
//
// Decomposition: as forward.jit.cu's, from the end. The steps of a batch do not wait for each other but for one
// product, so that fewer warps reach the bus. The recurrence is linear in the carry: chunks are walked from a carry of
// zero, with the derivative of what they hand on by what they are given; after one barrier a scan over the later chunks
// tells exactly what each was given, and it is walked again with that beside the difference to zero, until the
// difference is lost in the rounding of the carry. Where a product overflows, the channel is walked in one piece.
#include "scan/pointwise/cuda/pointwise.jit.cuh"

namespace {

constexpr T kLost = sizeof(T) == 8 ? T(0x1p-53) : T(0x1p-24);

__device__ constexpr bool wanted(int operand) {
  return (unsigned long long)(WEFT_WANTED) >> operand & 1;
}
__device__ constexpr bool has_grad(int state) {
  return (WEFT_GRADS) >> state & 1;
}

enum class Mode {
  kWhole,  // from `carry`
  kChunk,  // and its derivative
  kAgain   // with the difference to zero, of lanes that are `active`, until it is lost
};

struct Batch {
  E h[U][S], x[U][I], grad[U][S];
};

// Where the lane's channel is at step 0 of memory.
struct Places {
  const E *initial[S], *x[I], *grad[S];
  E* to[I];
};

__device__ __forceinline__ Places places_of(const PointwiseArgs& a, long long n) {
  Places found;
#pragma unroll
  for (int i = 0; i < S; ++i) {
    found.initial[i] = at<const E>(a.operands[i], n, 0);
    if (has_grad(i)) found.grad[i] = at<const E>(a.grads[i], n, 0);
  }
#pragma unroll
  for (int i = 0; i < I; ++i) {
    found.x[i] = at<const E>(a.operands[kInputs + i], n, 0);
    if (wanted(kInputs + i)) found.to[i] = at<E>(a.results[kInputs + i], n, 0);
  }
  return found;
}

__device__ __forceinline__ void load_batch(const PointwiseArgs& a, const Places& places, long long n, long long first,
                                           int count, Batch& to) {
#pragma unroll
  for (int u = 0; u < U; ++u) {
    if (u < count) {
      const long long t = in_memory(a, first + u), before = in_memory(a, first + u - 1);
#pragma unroll
      for (int i = 0; i < S; ++i) {
        to.h[u][i] = first + u == 0 ? *places.initial[i] : static_cast<const E*>(a.states[i])[before * a.N + n];
        if (has_grad(i)) to.grad[u][i] = places.grad[i][t * a.grads[i].step];
      }
#pragma unroll
      for (int i = 0; i < I; ++i) to.x[u][i] = places.x[i][t * a.operands[kInputs + i].step];
    }
  }
}

// Steps [first, end), the last first. `first` is a multiple of U. True where the difference was lost on the way.
template <Mode mode>
__device__ __forceinline__ bool walk(const PointwiseArgs& a, long long n, bool active, long long first, long long end,
                                     T (&carry)[S], T (&apart)[S], T (&derivative)[S * S], T (&sums)[P + 1]) {
  T p[P + 1];
  load_parameters(a, n, p);
  if (mode == Mode::kChunk) {
#pragma unroll
    for (int i = 0; i < S * S; ++i) derivative[i] = T(i % (S + 1) == 0);
  }
#pragma unroll
  for (int i = 0; i < P; ++i) sums[i] = T(0);
  bool lost = false;
  const Places places = places_of(a, n);
  long long t = first + (end - first - 1) / U * U;
  Batch ahead;
  load_batch(a, places, n, t, int(end - t), ahead);
  for (int count = int(end - t); t >= first; t -= U, count = U) {
    const Batch now = ahead;
    if (t > first) load_batch(a, places, n, t - U, U, ahead);
    const auto one = [&](int u) {
      T h[S], x[I], d[S], g[S + I + P];
#pragma unroll
      for (int i = 0; i < S; ++i) {
        h[i] = T(now.h[u][i]);
        d[i] = carry[i];
        if (has_grad(i)) d[i] += T(now.grad[u][i]);
      }
#pragma unroll
      for (int i = 0; i < I; ++i) x[i] = T(now.x[u][i]);
      if constexpr (mode == Mode::kChunk) {
        T jacobian[S * S], product[S * S];
        WEFT_VJP_JACOBIAN
#pragma unroll
        for (int i = 0; i < S; ++i) {
#pragma unroll
          for (int j = 0; j < S; ++j) {
            T sum = T(0);
#pragma unroll
            for (int k = 0; k < S; ++k) sum += jacobian[k * S + i] * derivative[k * S + j];
            product[i * S + j] = sum;
          }
        }
#pragma unroll
        for (int i = 0; i < S * S; ++i) derivative[i] = product[i];
      } else {
        WEFT_VJP
      }
      const long long to = in_memory(a, t + u);
#pragma unroll
      for (int i = 0; i < I; ++i) {
        if (wanted(kInputs + i) && active) places.to[i][to * a.results[kInputs + i].step] = E(g[kInputs + i]);
      }
#pragma unroll
      for (int i = 0; i < S; ++i) carry[i] = g[i];
      if constexpr (mode == Mode::kAgain) {
        // The sums have the rest already.
#pragma unroll
        for (int i = 0; i < S; ++i) d[i] = apart[i];
        const auto difference = [&] { WEFT_VJP };
        difference();
#pragma unroll
        for (int i = 0; i < S; ++i) apart[i] = g[i];
      }
#pragma unroll
      for (int i = 0; i < P; ++i) {
        if (wanted(kParameters + i) && active) sums[i] += g[kParameters + i];
      }
    };
    if (count == U) {
#pragma unroll
      for (int u = U - 1; u >= 0; --u) one(u);
    } else {
#pragma unroll
      for (int u = U - 1; u >= 0; --u) {
        if (u < count) one(u);
      }
    }
    if constexpr (mode == Mode::kAgain) {
      if (active) {
        lost = true;
#pragma unroll
        for (int i = 0; i < S; ++i) lost = lost && absolute(apart[i]) <= kLost * absolute(carry[i]);
        active = !lost;
      }
      if (!__any_sync(~0u, active)) break;
    }
  }
  return lost;
}

// The sum of a parameter's gradient over a chunk, for each channel.
__device__ __forceinline__ T& sum_of(const PointwiseArgs& a, int parameter, int chunk, long long n) {
  return static_cast<T*>(a.results[kParameters + parameter].data)[chunk * a.N + n];
}

__device__ __forceinline__ void put_initial(const PointwiseArgs& a, long long n, const T (&carry)[S]) {
#pragma unroll
  for (int i = 0; i < S; ++i) {
    if (wanted(i)) *at<E>(a.results[i], n, 0) = E(carry[i]);
  }
}

#if WEFT_CHUNKED

// What a chunk is given by those after it. False where that overflows on the way.
__device__ __forceinline__ bool given(const PointwiseArgs& a, int chunk, long long n, T (&carry)[S]) {
  constexpr int kAtOnce = S == 1 ? 8 : S == 2 ? 3 : 1;
  bool all_finite = true;
#pragma unroll
  for (int i = 0; i < S; ++i) carry[i] = T(0);
  for (int last = a.chunks - 1; last > chunk; last -= kAtOnce) {
    T end[kAtOnce][S], derivative[kAtOnce][S * S];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (last - k > chunk) {
#pragma unroll
        for (int i = 0; i < S; ++i) end[k][i] = element(a, a.ends, 0, last - k, S, i, n);
#pragma unroll
        for (int i = 0; i < S * S; ++i) derivative[k][i] = element(a, a.derivatives, 0, last - k, S * S, i, n);
      }
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (last - k > chunk) {
        T next[S];
#pragma unroll
        for (int i = 0; i < S; ++i) {
          next[i] = end[k][i];
#pragma unroll
          for (int j = 0; j < S; ++j) {
            // Nothing is given to the last.
            if (last - k < a.chunks - 1) next[i] += derivative[k][i * S + j] * carry[j];
          }
          all_finite = all_finite && finite(next[i]);
        }
#pragma unroll
        for (int i = 0; i < S; ++i) carry[i] = next[i];
      }
    }
  }
  return all_finite;
}

__device__ __forceinline__ void second_round(const PointwiseArgs& a, long long warp, long long warps,
                                             long long groups) {
  unsigned expected = 0;
  meet(a.counters, expected);
  for (long long index = warp; index < groups * a.chunks; index += warps) {
    const Task task = task_of(a, index, groups);
    const long long n = task.n;
    if (task.chunk == a.chunks - 1) continue;
    T carry[S], apart[S], unused[S * S], sums[P + 1];
    const bool known = given(a, task.chunk, n, carry);
    if (!known && task.valid) {
      a.fallen[n] = 1;
      a.counters[1] = 1;
    }
    bool active = false;
#pragma unroll
    for (int i = 0; i < S; ++i) {
      active = active || carry[i] != T(0);
      apart[i] = carry[i];
    }
    active = active && known && task.valid;
    if (!__any_sync(~0u, active)) continue;
    const long long first = task.chunk * a.chunk, end = first + a.chunk < a.T ? first + a.chunk : a.T;
    const bool lost = walk<Mode::kAgain>(a, n, active, first, end, carry, apart, unused, sums);
    if (!active) continue;
    if (task.chunk == 0 && !lost) put_initial(a, n, carry);
#pragma unroll
    for (int i = 0; i < P; ++i) {
      if (wanted(kParameters + i)) sum_of(a, i, task.chunk, n) += sums[i];
    }
  }
  meet(a.counters, expected);
  if (!seen(a.counters + 1)) return;
  for (long long group = warp; group < groups; group += warps) {
    const Task task = task_of(a, group, groups);
    const bool active = task.valid && a.fallen[task.n];
    if (!__any_sync(~0u, active)) continue;
    T carry[S], unused[S], derivative[S * S], sums[P + 1];
#pragma unroll
    for (int i = 0; i < S; ++i) carry[i] = T(0);
    for (int chunk = a.chunks - 1; chunk >= 0; --chunk) {
      const long long first = chunk * a.chunk, end = first + a.chunk < a.T ? first + a.chunk : a.T;
      walk<Mode::kWhole>(a, task.n, active, first, end, carry, unused, derivative, sums);
#pragma unroll
      for (int i = 0; i < P; ++i) {
        if (wanted(kParameters + i) && active) sum_of(a, i, chunk, task.n) = sums[i];
      }
    }
    if (active) put_initial(a, task.n, carry);
  }
}

#endif

}  // namespace

extern "C" __global__ void __launch_bounds__(128, S <= 2 ? 3 : 1)
    pointwise_backward(const __grid_constant__ PointwiseArgs a) {
  const long long groups = (a.N + 31) / 32;
  const long long warp = (long long)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  const long long warps = (long long)gridDim.x * (blockDim.x / 32);
  for (long long index = warp; index < groups * a.chunks; index += warps) {
    const Task task = task_of(a, index, groups);
    const long long n = task.n, first = task.chunk * a.chunk, end = first + a.chunk < a.T ? first + a.chunk : a.T;
    T carry[S], unused[S], derivative[S * S], sums[P + 1];
#pragma unroll
    for (int i = 0; i < S; ++i) carry[i] = T(0);
    walk<WEFT_CHUNKED ? Mode::kChunk : Mode::kWhole>(a, n, task.valid, first, end, carry, unused, derivative, sums);
    if (!task.valid) continue;
    if (task.chunk == 0) put_initial(a, n, carry);
#pragma unroll
    for (int i = 0; i < P; ++i) {
      if (wanted(kParameters + i)) sum_of(a, i, task.chunk, n) = sums[i];
    }
#if WEFT_CHUNKED
#pragma unroll
    for (int i = 0; i < S; ++i) element(a, a.ends, 0, task.chunk, S, i, n) = carry[i];
#pragma unroll
    for (int i = 0; i < S * S; ++i) element(a, a.derivatives, 0, task.chunk, S * S, i, n) = derivative[i];
#endif
  }
#if WEFT_CHUNKED
  second_round(a, warp, warps, groups);
#endif
}
