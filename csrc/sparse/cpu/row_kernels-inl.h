// The CPU kernels over rows: included once per instruction set, like common/cpu/simd-inl.h, whose rule on the standard
// library's templates holds here, too.
#include "common/cpu/simd-inl.h"
#include "sparse/cpu/row_kernels.h"

namespace weft::cpu::WEFT_ISA {
namespace {

using sparse::CsrMm;
using sparse::kTile;

template <typename E>
using Compute = typename Element<E>::Compute;

// A scalar, as it is summed.
template <typename E>
WEFT_INLINE Compute<E> widened(const E* p) {
  if constexpr (sizeof(E) == 2) {
    return Element<E>::load(p, 1)[0];
  } else {
    return *p;
  }
}
template <typename E>
WEFT_INLINE void put(E* p, Compute<E> x) {
  if constexpr (sizeof(E) == 2) {
    Element<E>::store(p, Simd<float>::broadcast(x), 1);
  } else {
    *p = x;
  }
}

// kVectors vectors of the sums stay in registers over all terms; the last of them may have `n` lanes alone.
template <int kVectors, typename E>
WEFT_INLINE void combine_block(const E* y, const int64_t* starts, const Compute<E>* factors, int64_t terms, int64_t n,
                               E* out) {
  using T = Compute<E>;
  using S = Simd<T>;
  constexpr int64_t kLanes = S::kLanes;
  typename S::Vec sum[kVectors] = {};
  for (int64_t k = 0; k < terms; ++k) {
    const E* const row = y + starts[k];
    const auto factor = S::broadcast(factors[k]);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      sum[v] += factor * Element<E>::load(row + v * kLanes, v == kVectors - 1 ? n : kLanes);
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    Element<E>::store(out + v * kLanes, sum[v], v == kVectors - 1 ? n : kLanes);
  }
}

template <typename E>
void combine(const void* y_, const int64_t* starts, const void* factors_, int64_t terms, int64_t n, void* out_) {
  using T = Compute<E>;
  constexpr int64_t kLanes = Simd<T>::kLanes;
  const E* y = static_cast<const E*>(y_);
  const T* factors = static_cast<const T*>(factors_);
  E* out = static_cast<E*>(out_);
  for (; n >= 4 * kLanes; n -= 4 * kLanes, y += 4 * kLanes, out += 4 * kLanes) {
    combine_block<4>(y, starts, factors, terms, kLanes, out);
  }
  for (; n >= kLanes; n -= kLanes, y += kLanes, out += kLanes) combine_block<1>(y, starts, factors, terms, kLanes, out);
  if (n > 0) combine_block<1>(y, starts, factors, terms, n, out);
}

template <typename I, typename E>
void vector(const CsrMm& p, const void* values_, const void* x_, void* out_, int64_t begin, int64_t end) {
  using T = Compute<E>;
  const I *crow = static_cast<const I*>(p.crow), *col = static_cast<const I*>(p.col),
          *index = static_cast<const I*>(p.index);
  const E *values = static_cast<const E*>(values_), *x = static_cast<const E*>(x_);
  E* out = static_cast<E*>(out_);
  const auto term = [&](int64_t e) {
    const T factor = widened(x + col[e]);
    return values == nullptr ? factor : widened(values + (index == nullptr ? e : int64_t(index[e]))) * factor;
  };
  for (int64_t i = begin; i < end; ++i) {
    // Four sums, because one would wait for itself at every element.
    T sum[4] = {};
    int64_t e = crow[i];
    const int64_t last = crow[i + 1];
    for (; e + 4 <= last; e += 4) {
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) sum[k] += term(e + k);
    }
    for (; e < last; ++e) sum[0] += term(e);
    put(out + i, (sum[0] + sum[1]) + (sum[2] + sum[3]));
  }
}

template <typename I, typename E>
void tile(const CsrMm& p, const void* packed_, void* out_, int64_t count, int64_t begin, int64_t end) {
  using T = Compute<E>;
  using S = Simd<T>;
  constexpr int kVectors = kTile / S::kLanes;
  const I *crow = static_cast<const I*>(p.crow), *col = static_cast<const I*>(p.col),
          *index = static_cast<const I*>(p.index);
  const E* values = static_cast<const E*>(p.values);
  const T* packed = static_cast<const T*>(packed_);
  E* out = static_cast<E*>(out_);
  for (int64_t i = begin; i < end; ++i) {
    typename S::Vec sum[kVectors] = {};
    for (int64_t e = crow[i]; e < crow[i + 1]; ++e) {
      const T v = values == nullptr ? T(1) : widened(values + (index == nullptr ? e : int64_t(index[e])));
      const T* line = packed + int64_t(col[e]) * kTile;
#pragma GCC unroll 8
      for (int k = 0; k < kVectors; ++k) sum[k] += S::broadcast(v) * S::load(line + k * S::kLanes, S::kLanes);
    }
    alignas(64) T row[kTile];
#pragma GCC unroll 8
    for (int k = 0; k < kVectors; ++k) S::store(row + k * S::kLanes, sum[k]);
    for (int64_t s = 0; s < count; ++s) put(out + s * p.rows + i, row[s]);
  }
}

}  // namespace

const sparse::RowKernels row_kernels = {
    {combine<Half>, combine<BFloat16>, combine<float>, combine<double>},
    {{vector<int32_t, Half>, vector<int32_t, BFloat16>, vector<int32_t, float>, vector<int32_t, double>},
     {vector<int64_t, Half>, vector<int64_t, BFloat16>, vector<int64_t, float>, vector<int64_t, double>}},
    {{tile<int32_t, Half>, tile<int32_t, BFloat16>, tile<int32_t, float>, tile<int32_t, double>},
     {tile<int64_t, Half>, tile<int64_t, BFloat16>, tile<int64_t, float>, tile<int64_t, double>}}};

}  // namespace weft::cpu::WEFT_ISA
