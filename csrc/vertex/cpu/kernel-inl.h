// The interpreter of vertex/cpu/kernel.h for one instruction set; included as common/cpu/simd-inl.h says.
#include "common/cpu/simd-inl.h"
#include "vertex/code.h"
#include "vertex/cpu/kernel.h"

namespace weft::cpu::WEFT_ISA {
namespace {

using vertex::Access;
using vertex::Op;

template <typename T>
struct Interpreter {
  using S = Simd<T>;
  using Vec = typename S::Vec;
  static constexpr int64_t kStride = kVertexBlock + S::kLanes;

  const VertexKernel& k;
  T* scratch;
  const T** registers;  // where each register's block is
  const T* zeros;

  template <typename F>
  WEFT_INLINE void unary(const VertexInstruction& i, int64_t n, F f) {
    const T* a = registers[i.a];
    T* to = target(i);
    for (int64_t j = 0; j < n; j += S::kLanes) S::store(to + j, f(S::load(a + j, n - j)), S::kLanes);
  }
  template <typename F>
  WEFT_INLINE void binary(const VertexInstruction& i, int64_t n, F f) {
    const T *a = registers[i.a], *b = registers[i.b];
    T* to = target(i);
    for (int64_t j = 0; j < n; j += S::kLanes) {
      S::store(to + j, f(S::load(a + j, n - j), S::load(b + j, n - j)), S::kLanes);
    }
  }
  template <typename F>
  WEFT_INLINE void scalar(const VertexInstruction& i, int64_t n, F f) {
    const T* a = registers[i.a];
    T* to = target(i);
    for (int64_t j = 0; j < n; ++j) to[j] = f(a[j]);
  }
  WEFT_INLINE T* target(const VertexInstruction& i) {
    T* to = scratch + i.result * kStride;
    registers[i.result] = to;
    return to;
  }
  WEFT_INLINE void fill(const VertexInstruction& i, T value) {
    T* to = target(i);
    for (int64_t j = 0; j < kVertexBlock; j += S::kLanes) S::store(to + j, S::broadcast(value), S::kLanes);
  }
  WEFT_INLINE void add(T* to, const T* from, int64_t n) {
    for (int64_t j = 0; j < n; j += S::kLanes) {
      S::store(to + j, S::load(to + j, S::kLanes) + S::load(from + j, n - j), S::kLanes);
    }
  }
  WEFT_INLINE T* at(int32_t buffer, int64_t row, int64_t edge) const {
    const VertexBuffer& b = k.buffers[buffer];
    const int64_t index = b.edges ? edge : b.rows == nullptr ? row : b.rows[row];
    return static_cast<T*>(b.data) + index * b.stride;
  }

  WEFT_INLINE void load(const VertexInstruction& i, int64_t row, int64_t edge, int64_t first) {
    const T* from;
    const auto access = static_cast<Access>(i.c);
    if (access == Access::kGather || access == Access::kChild) {
      const int64_t child =
          access == Access::kChild ? k.edge_children[edge] : k.gather[(i.d >> 1) * k.num_vertices + row];
      if (child < 0) {
        registers[i.result] = zeros;
        return;
      }
      from = at(i.a, child, 0) + i.b;
    } else {
      from = at(i.a, row, edge) + i.b;
    }
    if (i.d & 1) {
      fill(i, *from);
    } else {
      registers[i.result] = from + first;
    }
  }

  WEFT_INLINE void uses(const VertexInstruction& i, int64_t row, int64_t first, int64_t n) {
    T* to = scratch + i.result * kStride;
    const T* only = nullptr;  // the one term, or the sum in `to`
    const auto term = [&](const T* from) {
      if (only == nullptr) {
        only = from;
        return;
      }
      if (only != to) {
        for (int64_t j = 0; j < n; j += S::kLanes) S::store(to + j, S::load(only + j, n - j), S::kLanes);
        only = to;
      }
      add(to, from, n);
    };
    const VertexUse* table = k.tables[i.a];
    const int32_t size = k.table_sizes[i.a];
    for (int64_t u = k.first_use[row]; u < k.first_use[row + 1]; ++u) {
      for (int32_t t = 0; t < size; ++t) {
        if (table[t].column == k.use_columns[u])
          term(at(table[t].buffer, k.use_rows[u], 0) + table[t].first + i.b + first);
      }
    }
    for (int64_t u = k.first_sum_use[row]; u < k.first_sum_use[row + 1]; ++u) {
      const int64_t edge = k.sum_use_edges[u];
      for (int32_t t = 0; t < size; ++t) {
        if (table[t].column >= 0) continue;
        const int64_t parent = table[t].by_parent ? k.edge_parents[edge] : 0;
        term(at(table[t].buffer, parent, edge) + table[t].first + i.b + first);
      }
    }
    registers[i.result] = only == nullptr ? zeros : only;
  }

  // A block's sum, or its greatest, put where that of the blocks before it is.
  WEFT_INLINE void reduce(const VertexInstruction& i, T* to, bool fresh, int64_t n) {
    const T* a = registers[i.a];
    const bool sums = static_cast<Op>(i.op) == Op::kStoreSum;
    const auto greater = [](T x, T y) { return x != x ? x : x > y ? x : y; };
    T found = sums ? T(0) : a[0];
    if (sums) {
      Vec lanes{};
      for (int64_t j = 0; j < n; j += S::kLanes) lanes += S::load(a + j, n - j);
      for (int j = 0; j < S::kLanes; ++j) found += lanes[j];
    } else {
      for (int64_t j = 1; j < n; ++j) found = greater(found, a[j]);
    }
    *to = fresh ? found : sums ? *to + found : greater(*to, found);
  }

  void run(int64_t row, int64_t edge) {
    for (int64_t first = 0; first < k.width; first += kVertexBlock) {
      const int64_t n = smaller(kVertexBlock, k.width - first);
      int64_t loop = 0, e = edge, end = edge;
      for (int64_t p = 0; p < k.length; ++p) {
        const VertexInstruction& i = k.code[p];
        const Vec one = S::broadcast(1), zero = Vec{};
        switch (static_cast<Op>(i.op)) {
          case Op::kLoad:
            load(i, row, e, first);
            break;
          case Op::kConstant:
            fill(i, T(k.constants[i.a]));
            break;
          case Op::kUses:
            uses(i, row, first, n);
            break;
          case Op::kStore: {
            T* to = at(i.b, row, e) + i.c + first;
            const T* from = registers[i.a];
            for (int64_t j = 0; j < n; j += S::kLanes) S::store(to + j, S::load(from + j, n - j), n - j);
            break;
          }
          case Op::kStoreSum:
          case Op::kStoreMax:
            reduce(i, at(i.b, row, e) + i.c, first == 0, n);
            break;
          case Op::kBegin:
            fill(i, T(0));
            loop = p;
            e = k.first_edge[row];
            end = k.first_edge[row + 1];
            if (e == end) {
              while (static_cast<Op>(k.code[p].op) != Op::kEnd) ++p;
            }
            break;
          case Op::kAccumulate:
            add(scratch + i.result * kStride, registers[i.a], n);
            break;
          case Op::kEnd:
            if (++e < end) p = loop;
            break;
          case Op::kNeg:
            unary(i, n, [](Vec x) { return -x; });
            break;
          case Op::kSigmoid:
            unary(i, n, [](Vec x) { return S::sigmoid(x); });
            break;
          case Op::kTanh:
            unary(i, n, [](Vec x) { return S::tanh(x); });
            break;
          case Op::kRelu:
            unary(i, n, [](Vec x) { return S::relu(x); });
            break;
          case Op::kExp:
            scalar(i, n, [](T x) { return sizeof(T) == 4 ? T(__builtin_expf(x)) : T(__builtin_exp(x)); });
            break;
          case Op::kLog:
            scalar(i, n, [](T x) { return sizeof(T) == 4 ? T(__builtin_logf(x)) : T(__builtin_log(x)); });
            break;
          case Op::kSqrt:
            scalar(i, n, [](T x) { return sizeof(T) == 4 ? T(__builtin_sqrtf(x)) : T(__builtin_sqrt(x)); });
            break;
          case Op::kLog1p:
            scalar(i, n, [](T x) { return sizeof(T) == 4 ? T(__builtin_log1pf(x)) : T(__builtin_log1p(x)); });
            break;
          case Op::kErf:
            scalar(i, n, [](T x) { return sizeof(T) == 4 ? T(__builtin_erff(x)) : T(__builtin_erf(x)); });
            break;
          case Op::kSin:
            scalar(i, n, [](T x) { return sizeof(T) == 4 ? T(__builtin_sinf(x)) : T(__builtin_sin(x)); });
            break;
          case Op::kCos:
            scalar(i, n, [](T x) { return sizeof(T) == 4 ? T(__builtin_cosf(x)) : T(__builtin_cos(x)); });
            break;
          case Op::kAbs:
            unary(i, n, [zero](Vec x) { return x < zero ? -x : x + zero; });
            break;
          case Op::kSign:
            unary(i, n, [zero, one](Vec x) { return x > zero ? one : x < zero ? -one : x * zero; });
            break;
          case Op::kAdd:
            binary(i, n, [](Vec x, Vec y) { return x + y; });
            break;
          case Op::kSub:
            binary(i, n, [](Vec x, Vec y) { return x - y; });
            break;
          case Op::kMul:
            binary(i, n, [](Vec x, Vec y) { return x * y; });
            break;
          case Op::kDiv:
            binary(i, n, [](Vec x, Vec y) { return x / y; });
            break;
          case Op::kMax:
            // NaN of either side stays.
            binary(i, n, [](Vec x, Vec y) { return x != x ? x : x > y ? x : y; });
            break;
          case Op::kMin:
            binary(i, n, [](Vec x, Vec y) { return x != x ? x : x < y ? x : y; });
            break;
          case Op::kGreater:
            binary(i, n, [zero, one](Vec x, Vec y) { return x > y ? one : zero; });
            break;
          case Op::kGreaterEqual:
            binary(i, n, [zero, one](Vec x, Vec y) { return x >= y ? one : zero; });
            break;
          case Op::kEqual:
            binary(i, n, [zero, one](Vec x, Vec y) { return x == y ? one : zero; });
            break;
          case Op::kSelect: {
            const T *c = registers[i.a], *a = registers[i.b], *b = registers[i.c];
            T* to = target(i);
            for (int64_t j = 0; j < n; j += S::kLanes) {
              S::store(to + j, S::load(c + j, n - j) != zero ? S::load(a + j, n - j) : S::load(b + j, n - j),
                       S::kLanes);
            }
            break;
          }
        }
      }
    }
  }
};

template <typename T>
void run_kernel(const VertexKernel& kernel, int64_t first, int64_t end, void* memory) {
  using I = Interpreter<T>;
  T* scratch = static_cast<T*>(memory);
  T* zeros = scratch + kernel.registers * I::kStride;
  fill_zero(zeros, I::kStride);
  const T** registers = reinterpret_cast<const T**>(zeros + I::kStride);
  I interpreter{kernel, scratch, registers, zeros};
  for (int64_t i = first; i < end; ++i) {
    if (kernel.edges) {
      interpreter.run(kernel.edge_parents[i], i);
    } else {
      interpreter.run(i, 0);
    }
  }
}

constexpr VertexTables kVertexTables = {run_kernel<float>, run_kernel<double>};

}  // namespace
}  // namespace weft::cpu::WEFT_ISA
