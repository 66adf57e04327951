// CPU kernels of csr_mm and csr_sampled_mm: threads over samples and rows.
#include "sparse/csr_mm.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

#include "sparse/cpu/parallel.h"
#include "sparse/cpu/row_kernels.h"

namespace weft::sparse {
namespace {

// One column, values that the batch shares: a value and its index are read once for kTile samples, whose elements of x
// are neighbours.
template <typename T>
void mv_of_tiles(const CsrMm& p) {
  using Acc = Accumulate<T>;
  const auto tile = cpu::row_kernels().tile[p.wide][int(p.dtype)];
  std::vector<Acc> packed(p.columns * kTile);
  for (int64_t first = 0; first < p.batch; first += kTile) {
    const int64_t count = std::min(kTile, p.batch - first);
    const T* x = static_cast<const T*>(p.x) + first * p.x_batch;
    over_rows(1, p.columns, p.columns * count, [&](int64_t, int64_t begin, int64_t end) {
      for (int64_t s = 0; s < count; ++s) {
        for (int64_t j = begin; j < end; ++j) packed[j * kTile + s] = Acc(x[s * p.x_batch + j]);
      }
    });
    T* out = static_cast<T*>(p.out) + first * p.rows;
    over_rows(1, p.rows, p.nnz * count,
              [&](int64_t, int64_t begin, int64_t end) { tile(p, packed.data(), out, count, begin, end); });
  }
}

template <typename I, typename T>
void mm(const CsrMm& p) {
  using Acc = Accumulate<T>;
  // Packing pays where each column is read a few times.
  if (p.k == 1 && p.batch >= 4 && p.values_batch == 0 && p.x_batch != 0 && p.nnz >= 4 * p.columns) {
    return mv_of_tiles<T>(p);
  }
  const I *crow = static_cast<const I*>(p.crow), *col = static_cast<const I*>(p.col),
          *index = static_cast<const I*>(p.index);
  over_rows(p.batch, p.rows, (p.nnz + p.rows) * p.k, [&](int64_t b, int64_t begin, int64_t end) {
    const T* values = p.values ? static_cast<const T*>(p.values) + b * p.values_batch : nullptr;
    const T* x = static_cast<const T*>(p.x) + b * p.x_batch;
    T* out = static_cast<T*>(p.out) + b * p.rows * p.k;
    auto value = [&](I e) { return values ? Acc(values[index ? index[e] : e]) : Acc(1); };
    if (p.k == 1) return cpu::row_kernels().vector[p.wide][int(p.dtype)](p, values, x, out, begin, end);
    std::vector<Acc> sum(p.k);
    for (int64_t i = begin; i < end; ++i) {
      std::fill(sum.begin(), sum.end(), Acc(0));
      for (I e = crow[i]; e < crow[i + 1]; ++e) {
        const Acc v = value(e);
        const T* line = x + int64_t(col[e]) * p.k;
        for (int64_t c = 0; c < p.k; ++c) sum[c] += v * Acc(line[c]);
      }
      for (int64_t c = 0; c < p.k; ++c) out[i * p.k + c] = T(sum[c]);
    }
  });
}

template <typename I, typename T>
void sampled_mm(const CsrSampledMm& p) {
  using Acc = Accumulate<T>;
  const I *crow = static_cast<const I*>(p.crow), *col = static_cast<const I*>(p.col);
  const auto *left = static_cast<const T*>(p.left), *right = static_cast<const T*>(p.right);
  // With `shared` a single set of sums runs over all samples.
  const int64_t sets = p.shared ? 1 : p.batch, summed = p.shared ? p.batch : 1;
  over_rows(sets, p.rows, p.nnz * summed * p.k, [&](int64_t set, int64_t begin, int64_t end) {
    T* out = static_cast<T*>(p.out) + set * p.nnz;
    for (int64_t i = begin; i < end; ++i) {
      for (I e = crow[i]; e < crow[i + 1]; ++e) {
        Acc sum = 0;
        for (int64_t b = set; b < set + summed; ++b) {
          const T* l = left + b * p.left_batch + i * p.k;
          const T* r = right + b * p.right_batch + int64_t(col[e]) * p.k;
          for (int64_t c = 0; c < p.k; ++c) sum += Acc(l[c]) * Acc(r[c]);
        }
        out[e] = T(sum);
      }
    }
  });
}

}  // namespace

void csr_mm_cpu(const CsrMm& p) {
  dispatch(p.wide, p.dtype,
           [&](auto* i, auto* t) { mm<std::remove_pointer_t<decltype(i)>, std::remove_pointer_t<decltype(t)>>(p); });
}

void csr_sampled_mm_cpu(const CsrSampledMm& p) {
  dispatch(p.wide, p.dtype, [&](auto* i, auto* t) {
    sampled_mm<std::remove_pointer_t<decltype(i)>, std::remove_pointer_t<decltype(t)>>(p);
  });
}

}  // namespace weft::sparse
