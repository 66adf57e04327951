// The interpreter of vertex/exec/cpu/kernel.h for one instruction set; included as common/cpu/simd-inl.h says.
#include "common/cpu/elementwise-inl.h"
#include "vertex/exec/cpu/kernel.h"
#include "vertex/program/program.h"

namespace weft::cpu::WEFT_ISA {
namespace {

using vertex::Access;
using vertex::Instruction;
using vertex::Op;
using vertex::Use;

template <typename T>
struct Interpreter {
  using S = Simd<T>;
  using Vec = typename S::Vec;
  static constexpr int64_t kStride = kVertexBlock + S::kLanes;

  const VertexKernel& k;
  T* scratch;
  const T** registers;  // where each register's block is
  const T* zeros;
  T* converted;

  WEFT_INLINE T* target(const Instruction& i) {
    T* to = scratch + i.result * kStride;
    registers[i.result] = to;
    return to;
  }
  WEFT_INLINE void fill(const Instruction& i, T value) {
    T* to = target(i);
    for (int64_t j = 0; j < kVertexBlock; j += S::kLanes) S::store(to + j, S::broadcast(value), S::kLanes);
  }
  WEFT_INLINE void add(T* to, const T* from, int64_t n) {
    for (int64_t j = 0; j < n; j += S::kLanes) {
      S::store(to + j, S::load(to + j, S::kLanes) + S::load(from + j, n - j), S::kLanes);
    }
  }
  // Element `column` of a row (or edge), and how many elements before it the buffer begins.
  WEFT_INLINE int64_t at(const VertexBuffer& b, int64_t row, int64_t edge, int64_t column) const {
    const int64_t index = b.edges ? edge : b.rows == nullptr ? row : b.rows[row];
    return index * b.stride + column;
  }
  template <typename E>
  WEFT_INLINE static void widen(const VertexBuffer& b, int64_t at, T* to, int64_t n) {
    const E* from = static_cast<const E*>(b.data) + at;
    for (int64_t j = 0; j < n; j += S::kLanes) S::store(to + j, Element<E>::load(from + j, n - j), S::kLanes);
  }
  template <typename E>
  WEFT_INLINE static void narrow(const VertexBuffer& b, int64_t at, const T* from, int64_t n) {
    E* to = static_cast<E*>(b.data) + at;
    for (int64_t j = 0; j < n; j += S::kLanes) Element<E>::store(to + j, S::load(from + j, n - j), n - j);
  }
  // n elements as registers have them: in the buffer where that is their type, else in `room`.
  WEFT_INLINE const T* read(const VertexBuffer& b, int64_t at, T* room, int64_t n) const {
    if constexpr (sizeof(T) == 4) {
      if (b.dtype == DType::f16) {
        widen<Half>(b, at, room, n);
        return room;
      }
      if (b.dtype == DType::bf16) {
        widen<BFloat16>(b, at, room, n);
        return room;
      }
    }
    return static_cast<const T*>(b.data) + at;
  }
  WEFT_INLINE void write(const VertexBuffer& b, int64_t at, const T* from, int64_t n) const {
    if constexpr (sizeof(T) == 4) {
      if (b.dtype == DType::f16) return narrow<Half>(b, at, from, n);
      if (b.dtype == DType::bf16) return narrow<BFloat16>(b, at, from, n);
    }
    T* to = static_cast<T*>(b.data) + at;
    for (int64_t j = 0; j < n; j += S::kLanes) S::store(to + j, S::load(from + j, n - j), n - j);
  }
  WEFT_INLINE void load(const Instruction& i, int64_t row, int64_t edge, int64_t first, int64_t n) {
    const VertexBuffer& b = k.buffers[i.buffer];
    int64_t from = row;
    if (i.access == Access::kGather || i.access == Access::kChild) {
      const int64_t child =
          i.access == Access::kChild ? k.edge_children[edge] : k.gather[i.gather * k.num_vertices + row];
      if (child < 0) {
        registers[i.result] = zeros;
        return;
      }
      from = child;
    }
    if (i.broadcast) {
      T one[S::kLanes];
      fill(i, *read(b, at(b, from, edge, i.column), one, 1));
    } else {
      registers[i.result] = read(b, at(b, from, edge, i.column + first), scratch + i.result * kStride, n);
    }
  }

  WEFT_INLINE int64_t sum_uses(int64_t row) const { return k.first_sum_use == nullptr ? 0 : k.first_sum_use[row]; }

  WEFT_INLINE void uses(const Instruction& i, int64_t row, int64_t first, int64_t n) {
    T* to = scratch + i.result * kStride;
    const T* only = nullptr;  // the one term, or the sum in `to`
    const auto term = [&](const Use& use, int64_t row, int64_t edge) {
      const VertexBuffer& b = k.buffers[use.buffer];
      const T* from = read(b, at(b, row, edge, use.first + i.column + first), only == nullptr ? to : converted, n);
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
    const std::vector<Use>& table = k.tables[i.table];
    for (int64_t u = k.first_use[row]; u < k.first_use[row + 1]; ++u) {
      for (const Use& use : table) {
        if (use.column == k.users[2 * u + 1]) term(use, k.users[2 * u], 0);
      }
    }
    for (int64_t u = sum_uses(row); u < sum_uses(row + 1); ++u) {
      const int64_t edge = k.sum_use_edges[u];
      for (const Use& use : table) {
        if (use.column < 0) term(use, use.by_parent ? k.edge_parents[edge] : 0, edge);
      }
    }
    registers[i.result] = only == nullptr ? zeros : only;
  }

  WEFT_INLINE void scatter(const Instruction& i, int64_t row, int64_t first, int64_t n) {
    const VertexBuffer& b = k.buffers[i.buffer];
    const T* from = registers[i.a()];
    if (i.gather < 0) {
      for (int64_t u = sum_uses(row); u < sum_uses(row + 1); ++u) {
        write(b, at(b, 0, k.sum_use_edges[u], i.column + first), from, n);
      }
      return;
    }
    for (int64_t u = k.first_use[row]; u < k.first_use[row + 1]; ++u) {
      if (k.users[2 * u + 1] == i.gather) write(b, at(b, k.users[2 * u], 0, i.column + first), from, n);
    }
  }

  // A block's sum, or its greatest, put where that of the blocks before it is.
  WEFT_INLINE void reduce(const Instruction& i, int64_t row, int64_t edge, bool fresh, int64_t n) {
    const T* a = registers[i.a()];
    const bool sums = i.op == Op::kStoreSum;
    const auto greater = [](T x, T y) { return x != x ? x : x > y ? x : y; };
    T found = sums ? T(0) : a[0];
    if (sums) {
      Vec lanes{};
      for (int64_t j = 0; j < n; j += S::kLanes) lanes += S::load(a + j, n - j);
      for (int j = 0; j < S::kLanes; ++j) found += lanes[j];
    } else {
      for (int64_t j = 1; j < n; ++j) found = greater(found, a[j]);
    }
    const VertexBuffer& b = k.buffers[i.buffer];
    const int64_t place = at(b, row, edge, i.column);
    if (!fresh) {
      const T before = *read(b, place, converted, 1);
      found = sums ? before + found : greater(before, found);
    }
    converted[0] = found;
    write(b, place, converted, 1);
  }

  void run(int64_t row, int64_t edge) {
    for (int64_t first = 0; first < k.width; first += kVertexBlock) {
      const int64_t n = smaller(kVertexBlock, k.width - first);
      int64_t loop = 0, e = edge, end = edge;
      for (int64_t p = 0; p < k.length; ++p) {
        const Instruction& i = k.code[p];
        switch (i.op) {
          case Op::kLoad:
            load(i, row, e, first, n);
            break;
          case Op::kConstant:
            fill(i, T(k.constants[i.constant]));
            break;
          case Op::kUses:
            uses(i, row, first, n);
            break;
          case Op::kStore:
            write(k.buffers[i.buffer], at(k.buffers[i.buffer], row, e, i.column + first), registers[i.a()], n);
            break;
          case Op::kStoreSum:
          case Op::kStoreMax:
            reduce(i, row, e, first == 0, n);
            break;
          case Op::kScatter:
            scatter(i, row, first, n);
            break;
          case Op::kZero:
            registers[i.result] = zeros;
            break;
          case Op::kBegin:
            fill(i, T(0));
            loop = p;
            e = k.first_edge[row];
            end = k.first_edge[row + 1];
            if (e == end) {
              while (k.code[p].op != Op::kEnd) ++p;
            }
            break;
          case Op::kAccumulate:
            add(scratch + i.result * kStride, registers[i.a()], n);
            break;
          case Op::kEnd:
            if (++e < end) p = loop;
            break;
          default: {
            const T *a = registers[i.a()], *b = registers[i.b()], *c = registers[i.c()];
            Elements<T>::apply(i.op, target(i), a, b, c, n);
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
  T* converted = zeros + I::kStride;
  const T** registers = reinterpret_cast<const T**>(converted + I::kStride);
  I interpreter{kernel, scratch, registers, zeros, converted};
  for (int64_t i = first; i < end; ++i) {
    if (kernel.edges) {
      interpreter.run(kernel.edge_parents[i], i);
    } else {
      interpreter.run(i, 0);
    }
  }
}

}  // namespace

const VertexTables vertex_kernels = {run_kernel<float>, run_kernel<double>};

}  // namespace weft::cpu::WEFT_ISA
