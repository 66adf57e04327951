// The kernels of scan/pointwise/cpu/pointwise_kernels.h for one instruction set; included as common/cpu/simd-inl.h
// says.
#include "common/cpu/elementwise-inl.h"
#include "scan/pointwise/cpu/pointwise_kernels.h"

namespace weft::cpu::WEFT_ISA {
namespace {

using scan::PointwiseArgs;
using scan::PointwiseOperand;
using scan::StepProgram;

template <typename T, typename E>
class Walk {
  using L = Simd<T>;
  using Vec = typename L::Vec;
  static constexpr int64_t kStride = kPointwiseBlock + 16;
  static constexpr bool kHalf = sizeof(E) == 2;
  static constexpr T kNear = sizeof(T) == 8 ? T(0x1p-51) : T(0x1p-22);
  static constexpr T kLost = sizeof(T) == 8 ? T(0x1p-53) : T(0x1p-24);

 public:
  Walk(const PointwiseJob& job, const PointwiseBlock& block, void* memory)
      : job_(job),
        a_(*job.args),
        b_(block),
        columns_(block.channels * block.chunks),
        S_(job.states),
        scratch_(static_cast<T*>(memory)) {
    first_ = 2 * job.states + job.inputs + job.parameters;
    int64_t registers = first_;
    for (int64_t i = 0; i < job_.num_constants; ++i) registers = larger(registers, first_ + job_.constants[i] + 1);
    for (int64_t i = 0; i < job_.length; ++i) registers = larger(registers, first_ + job_.order[i] + 1);
    rest_ = scratch_ + registers * kStride;
    room_ = rest_ + (6 * S_ + 2 * S_ * S_ + job.parameters + 2) * kStride;
    at_ = reinterpret_cast<const T**>(room_);
    for (int64_t r = 0; r < registers; ++r) at_[r] = scratch_ + r * kStride;
    for (int64_t i = 0; i < job_.num_constants; ++i) {
      fill(scratch_ + (first_ + job_.constants[i]) * kStride, T(job_.code[job_.constants[i]].constant));
    }
    for (int64_t i = 0; i < job.parameters; ++i) {
      for (int64_t c = 0; c < b_.chunks; ++c) load(a_.operands[S_ + job.inputs + i], 0, c, parameter(i));
    }
  }

  void forward() {
    const bool again = job_.active != nullptr;
    T *derivative = extra(6 * S_), *product = derivative + S_ * S_ * kStride;
    for (int64_t i = 0; i < S_; ++i) {
      at_[i] = extra(i);
      for (int64_t c = 0; c < b_.chunks; ++c) {
        if (again) {
          copy(extra(i) + c * b_.channels, &element(a_.starts, S_, b_.chunk + c, i), b_.channels);
        } else {
          load(a_.operands[i], 0, c, extra(i));
        }
      }
    }
    if (job_.jacobian != nullptr) identity(derivative);
    begin_active();
    bool other = false;  // which of two places the state is in
    const int64_t steps = smaller(a_.chunk, a_.T - b_.chunk * a_.chunk);
    for (int64_t k = 0; k < steps; ++k) {
      const int64_t running = chunks_at(k);
      for (int64_t i = 0; i < job_.inputs; ++i) {
        for (int64_t c = 0; c < running; ++c)
          load(a_.operands[S_ + i], memory_step(c, k), c, scratch_ + (S_ + i) * kStride);
      }
      run();
      const bool tested = again && ends_batch(k);
      if (tested) remember(running, k);
      other = !other;
      for (int64_t i = 0; i < S_; ++i) {
        T* h = extra(other ? S_ + i : i);
        copy(h, at_[job_.results[i]], columns_);
        for (int64_t c = 0; c < running; ++c) {
          E* to = static_cast<E*>(a_.states[i]) + memory_step(c, k) * a_.N + b_.channel;
          put(to, h + c * b_.channels, c);
        }
      }
      if (job_.jacobian != nullptr) carry_derivative(derivative, product, /*transposed=*/false);
      for (int64_t i = 0; i < S_; ++i) at_[i] = extra(other ? S_ + i : i);
      if (kHalf && a_.marks != nullptr && ends_batch(k)) mark(running, k);
      for (int64_t c = 0; c < running; ++c) {
        if (tau(c, k) + 1 == end_of(c)) keep_end(c, derivative);
      }
      if (tested && !still_active(running, k)) return;
    }
  }

  void backward() {
    const bool again = job_.active != nullptr && !job_.whole;
    T *derivative = extra(6 * S_), *product = derivative + S_ * S_ * kStride, *sums = product + S_ * S_ * kStride;
    for (int64_t i = 0; i < S_; ++i) {
      fill(carry(i), T(0));
      for (int64_t c = 0; (again || job_.whole) && c < b_.chunks; ++c) {
        copy(carry(i) + c * b_.channels, &element(a_.starts, S_, b_.chunk + c, i), b_.channels);
      }
      copy(apart(i), carry(i), columns_);
    }
    if (job_.jacobian != nullptr) identity(derivative);
    for (int64_t i = 0; i < job_.parameters; ++i) fill(sums + i * kStride, T(0));
    begin_active();
    const int64_t steps = smaller(a_.chunk, a_.T - b_.chunk * a_.chunk);
    for (int64_t k = steps - 1; k >= 0; --k) {
      const int64_t running = chunks_at(k);
      for (int64_t c = 0; c < running; ++c) {
        const int64_t step = memory_step(c, k);
        for (int64_t i = 0; i < S_; ++i) {
          if (tau(c, k) == 0) {
            load(a_.operands[i], 0, c, scratch_ + i * kStride);
          } else {
            const PointwiseOperand states{a_.states[i], a_.N, 0, a_.N};
            load(states, memory_step(c, k - 1), c, scratch_ + i * kStride);
          }
          T* d = gradient(i) + c * b_.channels;
          if (job_.given >> i & 1) {
            load(a_.grads[i], step, c, gradient(i));
            for (int64_t j = 0; j < b_.channels; ++j) d[j] += carry(i)[c * b_.channels + j];
          } else {
            copy(d, carry(i) + c * b_.channels, b_.channels);
          }
        }
        for (int64_t i = 0; i < job_.inputs; ++i) load(a_.operands[S_ + i], step, c, scratch_ + (S_ + i) * kStride);
      }
      run();
      for (int64_t i = 0; i < job_.inputs; ++i) {
        if (!(job_.wanted >> (S_ + i) & 1)) continue;
        for (int64_t c = 0; c < running; ++c)
          put_channels(a_.results[S_ + i], memory_step(c, k), c, at_[job_.results[S_ + i]]);
      }
      if (!again) add_sums(sums, running);
      for (int64_t i = 0; i < S_; ++i) copy(extra(4 * S_ + i), at_[job_.results[i]], columns_);
      if (job_.jacobian != nullptr) carry_derivative(derivative, product, /*transposed=*/true, running * b_.channels);
      if (again) {
        for (int64_t i = 0; i < S_; ++i) copy(gradient(i), apart(i), columns_);
        run();
        add_sums(sums, running);
        for (int64_t i = 0; i < S_; ++i) copy(apart(i), at_[job_.results[i]], running * b_.channels);
      }
      for (int64_t i = 0; i < S_; ++i) copy(carry(i), extra(4 * S_ + i), running * b_.channels);
      if (again && (b_.chunk * a_.chunk + k) % kPointwiseBatch == 0 && !difference_lasts(running)) break;
    }
    for (int64_t c = 0; c < b_.chunks; ++c) {
      keep_carry(c, derivative, again);
      for (int64_t i = 0; i < job_.parameters; ++i) {
        if (!(job_.wanted >> (S_ + job_.inputs + i) & 1)) continue;
        T* to = static_cast<T*>(a_.results[S_ + job_.inputs + i].data) + (b_.chunk + c) * a_.N + b_.channel;
        const T* from = sums + i * kStride + c * b_.channels;
        for (int64_t j = 0; j < b_.channels; ++j) {
          if (again && was_active(c, j)) to[j] += from[j];
          if (!again && (job_.active == nullptr || was_active(c, j))) to[j] = from[j];
        }
      }
    }
  }

 private:
  static WEFT_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
  T* extra(int64_t i) { return rest_ + i * kStride; }
  T* carry(int64_t i) { return extra(i); }
  T* apart(int64_t i) { return extra(S_ + i); }
  T* stored(int64_t i) { return extra(2 * S_ + i); }
  T* active() { return extra(6 * S_ + 2 * S_ * S_ + job_.parameters); }  // 1 or 0 for each column
  T* parameter(int64_t i) { return scratch_ + (S_ + job_.inputs + i) * kStride; }
  T* gradient(int64_t i) { return scratch_ + (first_ - S_ + i) * kStride; }

  int64_t tau(int64_t c, int64_t k) const { return (b_.chunk + c) * a_.chunk + k; }
  int64_t end_of(int64_t c) const { return smaller((b_.chunk + c + 1) * a_.chunk, a_.T); }
  int64_t memory_step(int64_t c, int64_t k) const {
    const int64_t t = tau(c, k);
    return a_.reverse ? a_.T - 1 - t : t;
  }
  // Chunks of the block that have a step k: all but perhaps the last.
  int64_t chunks_at(int64_t k) const { return b_.chunks - (tau(b_.chunks - 1, k) >= a_.T); }
  bool ends_batch(int64_t k) const { return (k + 1) % kPointwiseBatch == 0; }
  T& element(void* data, int64_t count, int64_t chunk, int64_t i) const {
    return static_cast<T*>(data)[(chunk * count + i) * a_.N + b_.channel];
  }
  bool was_active(int64_t c, int64_t j) const {
    return job_.active == nullptr || job_.active[(b_.chunk + c) * a_.N + b_.channel + j];
  }

  static WEFT_INLINE void fill(T* to, T value) {
    for (int64_t j = 0; j < kPointwiseBlock; j += L::kLanes) L::store(to + j, L::broadcast(value), L::kLanes);
  }
  static WEFT_INLINE void copy(T* to, const T* from, int64_t n) {
    for (int64_t j = 0; j < n; j += L::kLanes) L::store(to + j, L::load(from + j, n - j), n - j);
  }
  void identity(T* derivative) {
    for (int64_t i = 0; i < S_ * S_; ++i) fill(derivative + i * kStride, T(i % (S_ + 1) == 0));
  }

  // The channels of chunk c of an operand at a step, to their columns.
  WEFT_INLINE void load(const PointwiseOperand& o, int64_t step, int64_t c, T* columns) const {
    T* to = columns + c * b_.channels;
    for (int64_t n = b_.channel, left = b_.channels; left > 0;) {
      const int64_t inside = n % o.inner, count = smaller(left, o.inner - inside);
      const E* from = static_cast<const E*>(o.data) + step * o.step + n / o.inner * o.outer + inside;
      if (count == 1) {
        to[0] = one(from);
      } else {
        for (int64_t j = 0; j < count; j += L::kLanes)
          L::store(to + j, Element<E>::load(from + j, count - j), count - j);
      }
      to += count, n += count, left -= count;
    }
  }
  static WEFT_INLINE T one(const E* from) { return Element<E>::load(from, 1)[0]; }

  // Columns of chunk c to memory, those that are active.
  WEFT_INLINE void put(E* to, const T* from, int64_t c) {
    const int64_t n = b_.channels;
    if (job_.active == nullptr) {
      for (int64_t j = 0; j < n; j += L::kLanes) Element<E>::store(to + j, L::load(from + j, n - j), n - j);
      return;
    }
    for (int64_t j = 0; j < n; ++j) {
      if (active()[c * n + j] != T(0)) Element<E>::store(to + j, L::broadcast(from[j]), 1);
    }
  }
  WEFT_INLINE void put_channels(const PointwiseOperand& o, int64_t step, int64_t c, const T* columns) {
    const T* from = columns + c * b_.channels;
    for (int64_t j = 0; j < b_.channels;) {
      const int64_t n = b_.channel + j, inside = n % o.inner, count = smaller(b_.channels - j, o.inner - inside);
      E* to = static_cast<E*>(o.data) + step * o.step + n / o.inner * o.outer + inside;
      for (int64_t m = 0; m < count; ++m) {
        if (job_.active != nullptr) {
          if (active()[c * b_.channels + j + m] != T(0)) Element<E>::store(to + m, L::broadcast(from[j + m]), 1);
        } else {
          Element<E>::store(to + m, L::load(from + j + m, count - m), count - m);
          m += L::kLanes - 1;
        }
      }
      j += count;
    }
  }

  void run() {
    for (int64_t i = 0; i < job_.length; ++i) {
      const StepProgram::Instruction& instruction = job_.code[job_.order[i]];
      const int64_t r = first_ + job_.order[i];
      const T* a = at_[instruction.operands[0]];
      if (instruction.kind == StepProgram::Kind::kStop) {
        at_[r] = a;
        continue;
      }
      Elements<T>::apply(instruction.op, scratch_ + r * kStride, a, at_[instruction.operands[1]],
                         at_[instruction.operands[2]], columns_);
    }
  }

  // derivative = jacobian derivative, or with the transposed jacobian, in the first `columns`.
  void carry_derivative(T* derivative, T* product, bool transposed, int64_t columns = kPointwiseBlock) {
    for (int64_t i = 0; i < S_; ++i) {
      for (int64_t j = 0; j < S_; ++j) {
        T* to = product + (i * S_ + j) * kStride;
        for (int64_t m = 0; m < columns_; m += L::kLanes) {
          Vec sum{};
          for (int64_t k = 0; k < S_; ++k) {
            const T* jacobian = at_[job_.jacobian[transposed ? k * S_ + i : i * S_ + k]];
            sum += L::load(jacobian + m, columns_ - m) * L::load(derivative + (k * S_ + j) * kStride + m, columns_ - m);
          }
          L::store(to + m, sum, L::kLanes);
        }
      }
    }
    for (int64_t i = 0; i < S_ * S_; ++i) {
      copy(derivative + i * kStride, product + i * kStride, smaller(columns, columns_));
    }
  }

  void begin_active() {
    if (job_.active == nullptr) return;
    for (int64_t c = 0; c < b_.chunks; ++c) {
      for (int64_t j = 0; j < b_.channels; ++j) active()[c * b_.channels + j] = was_active(c, j);
    }
  }

  // What the states are before the last step of a batch writes to them.
  void remember(int64_t running, int64_t k) {
    for (int64_t i = 0; i < S_; ++i) {
      for (int64_t c = 0; c < running; ++c) {
        if constexpr (kHalf) {
          copy(stored(i) + c * b_.channels, &mark_of(c, k, i), b_.channels);
        } else {
          const PointwiseOperand states{a_.states[i], a_.N, 0, a_.N};
          load(states, memory_step(c, k), c, stored(i));
        }
      }
    }
  }
  T& mark_of(int64_t c, int64_t k, int64_t i) const {
    return static_cast<T*>(a_.marks)[(tau(c, k) / kPointwiseBatch * S_ + i) * a_.N + b_.channel];
  }
  void mark(int64_t running, int64_t k) {
    for (int64_t i = 0; i < S_; ++i) {
      for (int64_t c = 0; c < running; ++c) {
        for (int64_t j = 0; j < b_.channels; ++j) {
          const int64_t column = c * b_.channels + j;
          if (job_.active == nullptr || active()[column] != T(0)) (&mark_of(c, k, i))[j] = at_[i][column];
        }
      }
    }
  }

  // After the last step of a batch: columns that meet what was stored are active no more.
  bool still_active(int64_t running, int64_t k) {
    bool any = false;
    for (int64_t c = 0; c < running; ++c) {
      for (int64_t j = 0; j < b_.channels; ++j) {
        const int64_t column = c * b_.channels + j;
        if (active()[column] == T(0)) continue;
        bool same = true;
        T most = 0;
        for (int64_t i = 0; i < S_; ++i) {
          const T x = at_[i][column], y = stored(i)[column], off = x > y ? x - y : y - x, size = y < T(0) ? -y : y;
          const T near = size > T(1) ? size : T(1);
          const bool equal = x == y || (x != x && y != y);
          // Not infinity and another, of which both sides were infinite.
          same = same && (equal || (off <= kNear * near && off - off == T(0)));
          if (!equal && off > most * near) most = off / near;
        }
        if (same) {
          active()[column] = T(0);
          count(b_.channel + j, k + 1, static_cast<float>(most));
        } else {
          any = true;
        }
      }
    }
    // A chunk whose last step has been is active no more either.
    return any;
  }
  void count(int64_t channel, int64_t steps, float apart) {
    if (a_.statistics == nullptr) return;
    long long* row = a_.statistics + 4 * channel;
    __atomic_fetch_add(row + 1, steps, __ATOMIC_RELAXED);
    unsigned word;
    __builtin_memcpy(&word, &apart, 4);
    const long long bits = word;
    long long seen = __atomic_load_n(row + 2, __ATOMIC_RELAXED);
    while (seen < bits &&
           !__atomic_compare_exchange_n(row + 2, &seen, bits, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
  }

  // Where chunk c has ended, and the derivative of that by its start; of columns that met nothing on the way.
  void keep_end(int64_t c, const T* derivative) {
    if (a_.ends == nullptr) return;
    for (int64_t j = 0; j < b_.channels; ++j) {
      const int64_t column = c * b_.channels + j;
      if (job_.active != nullptr) {
        if (active()[column] == T(0)) continue;
        active()[column] = T(0);
        count(b_.channel + j, end_of(c) - tau(c, 0), 0.0f);
      }
      for (int64_t i = 0; i < S_; ++i) (&element(a_.ends, S_, b_.chunk + c, i))[j] = at_[i][column];
      for (int64_t i = 0; job_.jacobian != nullptr && i < S_ * S_; ++i) {
        (&element(a_.derivatives, S_ * S_, b_.chunk + c, i))[j] = derivative[i * kStride + column];
      }
    }
  }

  void add_sums(T* sums, int64_t running) {
    const int64_t n = running * b_.channels;
    for (int64_t i = 0; i < job_.parameters; ++i) {
      if (!(job_.wanted >> (S_ + job_.inputs + i) & 1)) continue;
      T* to = sums + i * kStride;
      const T* from = at_[job_.results[S_ + job_.inputs + i]];
      for (int64_t j = 0; j < n; ++j) {
        if (job_.active == nullptr || active()[j] != T(0)) to[j] += from[j];
      }
    }
  }

  bool difference_lasts(int64_t running) {
    bool any = false;
    for (int64_t column = 0; column < columns_; ++column) {
      if (active()[column] == T(0)) continue;
      bool lost = column < running * b_.channels;
      for (int64_t i = 0; i < S_; ++i) {
        const T x = apart(i)[column], y = carry(i)[column];
        lost = lost && (x < T(0) ? -x : x) <= kLost * (y < T(0) ? -y : y);
      }
      if (lost) active()[column] = T(0);
      any = any || !lost;
    }
    return any;
  }

  void keep_carry(int64_t c, const T* derivative, bool again) {
    for (int64_t j = 0; j < b_.channels; ++j) {
      const int64_t column = c * b_.channels + j;
      if (job_.active != nullptr && active()[column] == T(0)) continue;
      for (int64_t i = 0; i < S_; ++i) {
        if (a_.ends != nullptr && !again) (&element(a_.ends, S_, b_.chunk + c, i))[j] = carry(i)[column];
        if (b_.chunk + c == 0 && (job_.wanted >> i & 1)) {
          Element<E>::store(static_cast<E*>(a_.results[i].data) + b_.channel + j, L::broadcast(carry(i)[column]), 1);
        }
      }
      for (int64_t i = 0; job_.jacobian != nullptr && i < S_ * S_; ++i) {
        (&element(a_.derivatives, S_ * S_, b_.chunk + c, i))[j] = derivative[i * kStride + column];
      }
    }
  }

  const PointwiseJob& job_;
  const PointwiseArgs& a_;
  const PointwiseBlock& b_;
  int64_t columns_, S_, first_;
  T *scratch_, *rest_, *room_;
  const T** at_;  // where each register is
};

template <typename T, typename E>
void forward(const PointwiseJob& job, const PointwiseBlock& block, void* scratch) {
  Walk<T, E>(job, block, scratch).forward();
}
template <typename T, typename E>
void backward(const PointwiseJob& job, const PointwiseBlock& block, void* scratch) {
  Walk<T, E>(job, block, scratch).backward();
}

}  // namespace

const PointwiseKernels pointwise_kernels = {
    {forward<float, Half>, forward<float, BFloat16>, forward<float, float>, forward<double, double>},
    {backward<float, Half>, backward<float, BFloat16>, backward<float, float>, backward<double, double>}};

}  // namespace weft::cpu::WEFT_ISA
