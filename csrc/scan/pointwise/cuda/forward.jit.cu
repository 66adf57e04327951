// h[t] = step(h[t-1], x[t], p) for channels that are independent of each other.
//   WEFT_CHUNKED        whether there are chunks of time
//   WEFT_NEXT           statements: next[S] from h[S], x[I] and p[P]
//   WEFT_NEXT_JACOBIAN  statements: next and jacobian[S * S], of each state after the step by each before it
// and those of pointwise.jit.cuh.
//
// Decomposition: a lane has a channel of a chunk of time and walks it; neighbouring lanes have neighbouring channels. A
// batch of steps of all inputs is loaded into registers while the batch before it is computed, so that the walk waits
// for arithmetic alone: 104 ns a step of a GRU's gates on an H200, where one warp a scheduler or more reach the bus.
// All of a batch at once, because who waits for one load waits for younger ones, too.
//
// Chunks: all are walked at once, from the initial state, and carry the derivative of their end by their start. Then,
// in rounds between barriers of the grid, every lane computes by a scan over its channel's chunks where its own should
// have started, if each end moves with its start as the derivative says (Newton's method), and where that is elsewhere,
// walks again, until it meets what is stored: from there all is right. No chunk moves in the last round. The first
// chunk that moves always starts right, so each round makes one more final; what moves after the last round is walked
// in order. All is decided by a channel alone, so none depends on its neighbours, and in a fixed order: the same bits
// in every run.
#include "scan/pointwise/cuda/pointwise.jit.cuh"

namespace {

constexpr T kNear = sizeof(T) == 8 ? T(0x1p-51) : T(0x1p-22);

// Whether a state is the same as another but for a rounding, and not infinity and another; otherwise `apart` is not
// touched.
__device__ __forceinline__ bool meets(const T (&h)[S], const T (&other)[S], T& apart) {
  bool same = true;
  T most = apart;
#pragma unroll
  for (int i = 0; i < S; ++i) {
    const T size = absolute(other[i]) > T(1) ? absolute(other[i]) : T(1), off = absolute(h[i] - other[i]);
    const bool equal = h[i] == other[i] || (h[i] != h[i] && other[i] != other[i]);
    same = same && (equal || (off <= kNear * size && off - off == T(0)));
    if (!equal && off > most * size) most = off / size;
  }
  if (same) apart = most;
  return same;
}

struct Walk {
  bool met;
  long long steps;
  T apart;
};

// Where the lane's next numbers are, and how far, in bytes, those of the step after are.
struct Places {
  const E* from[I];
  E* to[S];
  long long step[I], onward;

  __device__ __forceinline__ Places(const PointwiseArgs& a, long long n, long long first) {
    const long long direction = a.reverse ? -1 : 1, t = in_memory(a, first);
#pragma unroll
    for (int i = 0; i < I; ++i) {
      from[i] = at<const E>(a.operands[kInputs + i], n, t);
      step[i] = direction * a.operands[kInputs + i].step * int(sizeof(E));
    }
#pragma unroll
    for (int i = 0; i < S; ++i) to[i] = static_cast<E*>(a.states[i]) + t * a.N + n;
    onward = direction * a.N * int(sizeof(E));
  }
  __device__ __forceinline__ bool near() const {
    bool all = is_near(onward);
#pragma unroll
    for (int i = 0; i < I; ++i) all = all && is_near(step[i]);
    return all;
  }
  __device__ __forceinline__ void load(int count, E (&batch)[U][I]) {
    some_steps<false>(count, [&](int u) {
#pragma unroll
      for (int i = 0; i < I; ++i) {
        batch[u][i] = *from[i];
        from[i] = moved_by(from[i], step[i]);
      }
    });
  }
};

// Steps of a span from h on. kAgain: lanes that are `active` write, each until it meets what is stored.
template <bool kDerivative, bool kAgain>
__device__ __forceinline__ Walk walk(const PointwiseArgs& a, long long n, bool active, const Span& span, T (&h)[S],
                                     T (&derivative)[S * S]) {
  const long long first = span.first, end = span.end;
  T p[P + 1];
  load_parameters(a, n, p);
  Places places(a, n, first);
  Walk found{false, 0, T(0)};
  if (kDerivative) set_identity(derivative);
  E batch[U][I];
  places.load(int(end - first < U ? end - first : U), batch);

  const auto one = [&](const E(&input)[I]) {
    T x[I], next[S];
#pragma unroll
    for (int i = 0; i < I; ++i) x[i] = T(input[i]);
    if constexpr (kDerivative) {
      T jacobian[S * S];
      WEFT_NEXT_JACOBIAN
      set_product<false>(derivative, jacobian, derivative);
    } else {
      WEFT_NEXT
    }
    set(h, next);
  };
  // What is stored at the end of the batch of `count` steps from t on, and whether the warp is done after it.
  T stored[S];
  const auto begin = [&](long long t, int count) {
    if (!kAgain) return;
#pragma unroll
    for (int i = 0; i < S; ++i) {
      if constexpr (kHalf) {
        stored[i] = static_cast<const T*>(a.marks)[(t / U * S + i) * a.N + n];
      } else {
        stored[i] = T(*moved_by(places.to[i], (count - 1) * places.onward));
      }
    }
  };
  const auto is_done = [&](long long t, int count) {
    if (kHalf && WEFT_CHUNKED && active) {
#pragma unroll
      for (int i = 0; i < S; ++i) static_cast<T*>(a.marks)[(t / U * S + i) * a.N + n] = h[i];
    }
    if (!kAgain) return false;
    if (active) {
      found.steps += count;
      found.met = meets(h, stored, found.apart);
      active = !found.met;
    }
    return !__any_sync(~0u, active);
  };

  long long t = first;
  if (!WEFT_CHUNKED && a.N >= kMany && places.near()) {
    for (; t + 2 * U <= end; t += U) {
      begin(t, U);
      all_steps<false>([&](int u) {
        one(batch[u]);
#pragma unroll
        for (int i = 0; i < S; ++i) {
          if (active) *moved_near(places.to[i], places.onward, u) = E(h[i]);
        }
#pragma unroll
        for (int i = 0; i < I; ++i) batch[u][i] = *moved_near(places.from[i], places.step[i], u);
      });
#pragma unroll
      for (int i = 0; i < S; ++i) places.to[i] = moved_near(places.to[i], places.onward, U);
#pragma unroll
      for (int i = 0; i < I; ++i) places.from[i] = moved_near(places.from[i], places.step[i], U);
      if (is_done(t, U)) return found;
    }
  }
#pragma unroll 1
  for (; t < end; t += U) {
    const int count = int(end - t < U ? end - t : U);
    begin(t, count);
    E now[U][I];
#pragma unroll
    for (int u = 0; u < U; ++u) {
#pragma unroll
      for (int i = 0; i < I; ++i) now[u][i] = batch[u][i];
    }
    if (t + U < end) places.load(int(end - t - U < U ? end - t - U : U), batch);
    some_steps<false>(count, [&](int u) {
      one(now[u]);
#pragma unroll
      for (int i = 0; i < S; ++i) {
        if (active) *places.to[i] = E(h[i]);
        places.to[i] = moved_by(places.to[i], places.onward);
      }
    });
    if (is_done(t, count)) break;
  }
  return found;
}

#if WEFT_CHUNKED

__device__ __forceinline__ void note(const PointwiseArgs& a, long long n, int round, const Walk& walk, bool fell) {
  if (a.statistics == nullptr) return;
  long long* row = a.statistics + 4 * n;
  scan::raise_count(row, static_cast<long long>(round));
  scan::add_count(row + 1, walk.steps);
  if (walk.met) scan::raise_count(row + 2, static_cast<long long>(__float_as_uint(float(walk.apart))));
  if (fell) row[3] = 1;
}

__device__ __forceinline__ void accepted(const PointwiseArgs& a, long long n, T apart) {
  if (a.statistics == nullptr || !(apart > T(0))) return;
  scan::raise_count(a.statistics + 4 * n + 2, static_cast<long long>(__float_as_uint(float(apart))));
}

// Where `chunk` should start, and whether that is elsewhere than where it did.
__device__ __forceinline__ bool moved(const PointwiseArgs& a, int turn, int chunk, long long n, T (&start)[S],
                                      T& apart) {
  constexpr int kAtOnce = S == 1 ? 8 : S == 2 ? 3 : 1;
  get(a, a.ends, turn, 0, n, start);
  for (int first = 1; first < chunk; first += kAtOnce) {
    T began[kAtOnce][S], end[kAtOnce][S], derivative[kAtOnce][S * S];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (first + k < chunk) {
        get(a, a.starts, turn, first + k, n, began[k]);
        get(a, a.ends, turn, first + k, n, end[k]);
        get(a, a.derivatives, turn, first + k, n, derivative[k]);
      }
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (first + k < chunk) {
        T nothing = T(0), next[S];
        const bool stays = meets(start, began[k], nothing);
        bool all_finite = true;
#pragma unroll
        for (int i = 0; i < S; ++i) {
          next[i] = end[k][i];
#pragma unroll
          for (int j = 0; j < S; ++j) next[i] += derivative[k][i * S + j] * (start[j] - began[k][j]);
          all_finite = all_finite && finite(next[i]);
        }
#pragma unroll
        for (int i = 0; i < S; ++i) start[i] = stays || !all_finite ? end[k][i] : next[i];
      }
    }
  }
  T began[S];
  get(a, a.starts, turn, chunk, n, began);
  return !meets(start, began, apart);
}

__device__ __forceinline__ void rounds(const PointwiseArgs& a, long long warp, long long warps, long long groups) {
  unsigned* arrived = a.counters;
  unsigned* walked = a.counters + 1;  // in this round
  unsigned expected = 0;
  for (int round = 2;; ++round) {
    meet(arrived, expected);
    if (round > 2 && !seen(walked + round - 1)) return;
    const int before = round & 1, after = before ^ 1;
    if (round > scan::kPointwiseRounds) {
      for (long long group = warp; group < groups; group += warps) {
        const Task task = task_of(a, group, groups);
        for (int chunk = 1; chunk < a.chunks; ++chunk) {
          T start[S], began[S], unused[S * S];
          get(a, a.ends, before, chunk - 1, task.n, start);
          get(a, a.starts, before, chunk, task.n, began);
          T apart = T(0);
          const bool active = !meets(start, began, apart) && task.valid;
          if (!__any_sync(~0u, active)) continue;
          const Walk found = walk<false, true>(a, task.n, active, span_of(a, chunk), start, unused);
          if (!active) continue;
          note(a, task.n, round, found, true);
          if (!found.met) put(a, a.ends, before, chunk, task.n, start);
        }
      }
      return;
    }
    for (long long index = warp; index < groups * a.chunks; index += warps) {
      const Task task = task_of(a, index, groups);
      const long long n = task.n;
      T start[S], end[S], derivative[S * S];
      T apart = T(0);
      const bool active = task.chunk > 0 && moved(a, before, task.chunk, n, start, apart) && task.valid;
      if (!active && task.valid) accepted(a, n, apart);
      Walk found{true, 0, T(0)};
#pragma unroll
      for (int i = 0; i < S; ++i) end[i] = active ? start[i] : T(0);
      if (__any_sync(~0u, active)) {
        if (threadIdx.x % 32 == 0) walked[round] = 1;
        found = walk<true, true>(a, n, active, span_of(a, task.chunk), end, derivative);
      }
      if (!task.valid) continue;
      if (!active) get(a, a.starts, before, task.chunk, n, start);
      if (!active || found.met) {
        get(a, a.ends, before, task.chunk, n, end);
        get(a, a.derivatives, before, task.chunk, n, derivative);
      }
      put(a, a.starts, after, task.chunk, n, start);
      put(a, a.ends, after, task.chunk, n, end);
      put(a, a.derivatives, after, task.chunk, n, derivative);
      if (active) note(a, n, round, found, false);
    }
  }
}

#endif

}  // namespace

// A plain walk of the most channels that are not cut, 23 warps a multiprocessor, is all on the device at once.
extern "C" __global__ void __launch_bounds__(128, S > 2          ? 1
                                                  : WEFT_CHUNKED ? 4
                                                                 : 6)
    pointwise_forward(const __grid_constant__ PointwiseArgs a) {
  const long long groups = (a.N + 31) / 32;
  const long long warp = (long long)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  const long long warps = (long long)gridDim.x * (blockDim.x / 32);
  for (long long index = warp; index < groups * a.chunks; index += warps) {
    const Task task = task_of(a, index, groups);
    T h[S], derivative[S * S];
#pragma unroll
    for (int i = 0; i < S; ++i) h[i] = T(*at<const E>(a.operands[i], task.n, 0));
    if (WEFT_CHUNKED && task.valid) put(a, a.starts, 0, task.chunk, task.n, h);
    walk<WEFT_CHUNKED, false>(a, task.n, task.valid, span_of(a, task.chunk), h, derivative);
    if (WEFT_CHUNKED && task.valid) {
      put(a, a.ends, 0, task.chunk, task.n, h);
      put(a, a.derivatives, 0, task.chunk, task.n, derivative);
    }
  }
#if WEFT_CHUNKED
  rounds(a, warp, warps, groups);
#endif
}
