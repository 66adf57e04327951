// Gradients of h[t] = step(h[t-1], x[t], p): carry[t] = (grad[t+1] + carry[t+1]) J[t+1] from the last step to the
// first, and on the way the gradients of inputs and parameters, with the derivatives of the step computed again.
//   WEFT_CHUNKED       whether there are chunks of time
//   WEFT_GRADS         bits: the states that have a gradient
//   WEFT_WANTED        bits: the operands whose gradient is asked for, as in PointwiseArgs::results
//   WEFT_VJP           statements: g[S + I + P], the gradients of h[S], x[I] and p[P], where d[S] are those of
//                      the states after the step
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

// Where the lane's channel is, and where it goes: from the last step of a span down. Of the states, those before a
// step.
struct Places {
  const E *initial[S], *h[S], *grad[S], *x[I];
  E* to[I];
  const PointwiseArgs& a;

  // From a step to the one before, in bytes. Computed where it is asked for: pointers take enough registers.
  __device__ __forceinline__ long long back(long long step) const {
    return (a.reverse ? 1 : -1) * step * int(sizeof(E));
  }

  __device__ __forceinline__ Places(const PointwiseArgs& a, long long n, long long last) : a(a) {
    const long long one = a.reverse ? 1 : -1, t = in_memory(a, last);
#pragma unroll
    for (int i = 0; i < S; ++i) {
      initial[i] = at<const E>(a.operands[i], n, 0);
      h[i] = static_cast<const E*>(a.states[i]) + (t + one) * a.N + n;
      if (has_grad(i)) grad[i] = at<const E>(a.grads[i], n, t);
    }
#pragma unroll
    for (int i = 0; i < I; ++i) {
      x[i] = at<const E>(a.operands[kInputs + i], n, t);
      if (wanted(kInputs + i)) to[i] = at<E>(a.results[kInputs + i], n, t);
    }
  }
  __device__ __forceinline__ bool near() const {
    bool all = is_near(back(a.N));
#pragma unroll
    for (int i = 0; i < S; ++i) all = all && (!has_grad(i) || is_near(back(a.grads[i].step)));
#pragma unroll
    for (int i = 0; i < I; ++i)
      all = all && is_near(back(a.operands[kInputs + i].step)) &&
            (!wanted(kInputs + i) || is_near(back(a.results[kInputs + i].step)));
    return all;
  }
  // What is loaded of step u, `steps` down from where the places are.
  __device__ __forceinline__ void load_near(int u, int steps, Batch& batch) const {
#pragma unroll
    for (int i = 0; i < S; ++i) {
      batch.h[u][i] = *moved_near(h[i], back(a.N), steps);
      if (has_grad(i)) batch.grad[u][i] = *moved_near(grad[i], back(a.grads[i].step), steps);
    }
#pragma unroll
    for (int i = 0; i < I; ++i) batch.x[u][i] = *moved_near(x[i], back(a.operands[kInputs + i].step), steps);
  }
  // After a batch.
  __device__ __forceinline__ void loaded_near() {
#pragma unroll
    for (int i = 0; i < S; ++i) {
      h[i] = moved_near(h[i], back(a.N), U);
      if (has_grad(i)) grad[i] = moved_near(grad[i], back(a.grads[i].step), U);
    }
#pragma unroll
    for (int i = 0; i < I; ++i) x[i] = moved_near(x[i], back(a.operands[kInputs + i].step), U);
  }
  // The next `count` steps, of which the first is step 0 or not.
  __device__ __forceinline__ void load(bool begins, int count, Batch& batch) {
    some_steps<true>(count, [&](int u) {
#pragma unroll
      for (int i = 0; i < S; ++i) {
        batch.h[u][i] = *(u == 0 && begins ? initial[i] : h[i]);
        h[i] = moved_by(h[i], back(a.N));
        if (has_grad(i)) {
          batch.grad[u][i] = *grad[i];
          grad[i] = moved_by(grad[i], back(a.grads[i].step));
        }
      }
#pragma unroll
      for (int i = 0; i < I; ++i) {
        batch.x[u][i] = *x[i];
        x[i] = moved_by(x[i], back(a.operands[kInputs + i].step));
      }
    });
  }
};

// Steps of a span, the last first; it begins at a multiple of U. True where the difference was lost on the way.
template <Mode mode>
__device__ __forceinline__ bool walk(const PointwiseArgs& a, long long n, bool active, const Span& span, T (&carry)[S],
                                     T (&apart)[S], T (&derivative)[S * S], T (&sums)[P + 1]) {
  const long long first = span.first, end = span.end;
  T p[P + 1];
  load_parameters(a, n, p);
  if (mode == Mode::kChunk) set_identity(derivative);
  clear(sums);
  bool lost = false;
  Places places(a, n, end - 1);
  long long t = first + (end - first - 1) / U * U;
  Batch batch;
  places.load(t == 0, int(end - t), batch);

  // Step u of a batch; put(i, gradient) is of input i.
  const auto one = [&](const Batch& given, int u, const auto& put) {
    T h[S], x[I], d[S], g[S + I + P];
#pragma unroll
    for (int i = 0; i < S; ++i) {
      h[i] = T(given.h[u][i]);
      d[i] = carry[i];
      if (has_grad(i)) d[i] += T(given.grad[u][i]);
    }
#pragma unroll
    for (int i = 0; i < I; ++i) x[i] = T(given.x[u][i]);
    if constexpr (mode == Mode::kChunk) {
      T jacobian[S * S];
      WEFT_VJP_JACOBIAN
      set_product<true>(derivative, jacobian, derivative);
    } else {
      WEFT_VJP
    }
#pragma unroll
    for (int i = 0; i < I; ++i) {
      if (wanted(kInputs + i)) put(i, E(g[kInputs + i]));
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
  const auto is_done = [&] {
    if constexpr (mode != Mode::kAgain) return false;
    if (active) {
      lost = true;
#pragma unroll
      for (int i = 0; i < S; ++i) lost = lost && absolute(apart[i]) <= kLost * absolute(carry[i]);
      active = !lost;
    }
    return !__any_sync(~0u, active);
  };

  // A batch that is not whole is the first.
  const auto some = [&](int count) {
    const Batch now = batch;
    if (t > first) places.load(t == U, U, batch);
    some_steps<true>(count, [&](int u) {
      one(now, u, [&](int i, E gradient) {
        if (active) *places.to[i] = gradient;
        places.to[i] = moved_by(places.to[i], places.back(a.results[kInputs + i].step));
      });
    });
    t -= U;
    return is_done();
  };
  const bool near = !WEFT_CHUNKED && a.N >= kMany && places.near();
  for (int count = int(end - t);; count = U) {
    while (near && count == U && t - U >= first && t > U) {
      all_steps<true>([&](int u) {
        one(batch, u, [&](int i, E gradient) {
          if (active) *moved_near(places.to[i], places.back(a.results[kInputs + i].step), U - 1 - u) = gradient;
        });
        places.load_near(u, U - 1 - u, batch);
      });
      places.loaded_near();
#pragma unroll
      for (int i = 0; i < I; ++i) {
        if (!wanted(kInputs + i)) continue;
        places.to[i] = moved_near(places.to[i], places.back(a.results[kInputs + i].step), U);
      }
      t -= U;
      if (is_done()) return lost;
    }
    if (some(count) || t < first) break;
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
  clear(carry);
  for (int last = a.chunks - 1; last > chunk; last -= kAtOnce) {
    T end[kAtOnce][S], derivative[kAtOnce][S * S];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (last - k > chunk) {
        get(a, a.ends, 0, last - k, n, end[k]);
        get(a, a.derivatives, 0, last - k, n, derivative[k]);
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
        set(carry, next);
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
    const bool lost = walk<Mode::kAgain>(a, n, active, span_of(a, task.chunk), carry, apart, unused, sums);
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
    clear(carry);
    for (int chunk = a.chunks - 1; chunk >= 0; --chunk) {
      walk<Mode::kWhole>(a, task.n, active, span_of(a, chunk), carry, unused, derivative, sums);
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

// A plain walk of the most channels that are not cut, 23 warps a multiprocessor, is all on the device at once where a
// lane has room for that.
constexpr int kFewOperands = 8;
constexpr int kBlocks = S > 2 ? 1 : WEFT_CHUNKED || S > 1 || I + P > kFewOperands ? 3 : 6;

extern "C" __global__ void __launch_bounds__(128, kBlocks) pointwise_backward(const __grid_constant__ PointwiseArgs a) {
  const long long groups = (a.N + 31) / 32;
  const long long warp = (long long)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  const long long warps = (long long)gridDim.x * (blockDim.x / 32);
  for (long long index = warp; index < groups * a.chunks; index += warps) {
    const Task task = task_of(a, index, groups);
    const long long n = task.n;
    T carry[S], unused[S], derivative[S * S], sums[P + 1];
    clear(carry);
    walk<WEFT_CHUNKED ? Mode::kChunk : Mode::kWhole>(a, n, task.valid, span_of(a, task.chunk), carry, unused,
                                                     derivative, sums);
    if (!task.valid) continue;
    if (task.chunk == 0) put_initial(a, n, carry);
#pragma unroll
    for (int i = 0; i < P; ++i) {
      if (wanted(kParameters + i)) sum_of(a, i, task.chunk, n) = sums[i];
    }
#if WEFT_CHUNKED
    put(a, a.ends, 0, task.chunk, n, carry);
    put(a, a.derivatives, 0, task.chunk, n, derivative);
#endif
  }
#if WEFT_CHUNKED
  second_round(a, warp, warps, groups);
#endif
}
