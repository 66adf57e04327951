// CPU kernels of csr_matmul and its gradients: threads over tiles of rows, or of gathered elements, whose
// samples follow each other; a dense row of workspace each where products are found again.
#include "sparse/csr_matmul.h"

#include <algorithm>
#include <vector>

#include "sparse/cpu/parallel.h"
#include "sparse/cpu/row_kernels.h"

namespace weft::sparse {
namespace {

template <typename I>
struct Indices {
  const I *a_crow, *a_col, *b_crow, *b_col, *c_crow, *c_col, *axpy, *gather, *starts, *left, *right, *shared_lists,
      *t_crow, *t_col, *t_index;
  explicit Indices(const CsrMatmul& m)
      : a_crow(static_cast<const I*>(m.a_crow)),
        a_col(static_cast<const I*>(m.a_col)),
        b_crow(static_cast<const I*>(m.b_crow)),
        b_col(static_cast<const I*>(m.b_col)),
        c_crow(static_cast<const I*>(m.c_crow)),
        c_col(static_cast<const I*>(m.c_col)),
        axpy(static_cast<const I*>(m.axpy)),
        gather(static_cast<const I*>(m.gather)),
        starts(static_cast<const I*>(m.starts)),
        left(static_cast<const I*>(m.left)),
        right(static_cast<const I*>(m.right)),
        shared_lists(static_cast<const I*>(m.shared_lists)),
        t_crow(static_cast<const I*>(m.t_crow)),
        t_col(static_cast<const I*>(m.t_col)),
        t_index(static_cast<const I*>(m.t_index)) {}

  // One more than the last column of the product.
  int64_t columns(const CsrMatmul& m) const {
    int64_t last = -1;
    for (int64_t i = 0; i < m.rows; ++i) {
      if (c_crow[i + 1] > c_crow[i]) last = std::max<int64_t>(last, c_col[c_crow[i + 1] - 1]);
    }
    return last + 1;
  }
};

template <typename I, typename T>
void gather(const CsrMatmul& m) {
  using Acc = Accumulate<T>;
  const Indices<I> p(m);
  over_tiles(m.batch, m.gather_elements, 2048, 2 * m.gather_products, [&](int64_t sample, int64_t begin, int64_t end) {
    const T* x = static_cast<const T*>(m.x) + sample * m.x_batch;
    const T* y = static_cast<const T*>(m.y) + sample * m.y_batch;
    T* out = static_cast<T*>(m.out) + sample * m.c_nnz;
    auto element = [&](int64_t l) -> T& { return out[p.gather ? int64_t(p.gather[l]) : l]; };
    if (!p.starts && !p.left && !p.right) {
      for (int64_t l = begin; l < end; ++l) out[l] = T(Acc(x[l]) * Acc(y[l]));
    } else if (!p.starts && !p.left) {
      for (int64_t l = begin; l < end; ++l) element(l) = T(Acc(x[l]) * Acc(y[p.right[l]]));
    } else if (!p.starts && !p.right) {
      for (int64_t l = begin; l < end; ++l) element(l) = T(Acc(x[p.left[l]]) * Acc(y[l]));
    } else if (!p.starts) {
      for (int64_t l = begin; l < end; ++l) element(l) = T(Acc(x[p.left[l]]) * Acc(y[p.right[l]]));
    } else {
      for (int64_t l = begin; l < end; ++l) {
        Acc sum = 0;
        for (I s = p.starts[l]; s < p.starts[l + 1]; ++s) sum += Acc(x[p.left ? p.left[s] : s]) * Acc(y[p.right[s]]);
        element(l) = T(sum);
      }
    }
  });
}

template <typename I, typename T>
void shared_lists(const CsrMatmul& m) {
  using Acc = Accumulate<T>;
  const Indices<I> p(m);
  const int64_t rows_of_tile = std::clamp<int64_t>(2048 * m.rows / std::max<int64_t>(m.c_nnz, 1), 1, 16);
  over_tiles(m.batch, m.gather_rows, rows_of_tile, 2 * m.c_nnz, [&](int64_t sample, int64_t begin, int64_t end) {
    const T *all_x = static_cast<const T*>(m.x) + sample * m.x_batch,
            *all_y = static_cast<const T*>(m.y) + sample * m.y_batch;
    std::vector<I> origin;  // of b's rows
    for (int64_t r = begin; r < end; ++r) {
      const int64_t i = p.gather ? int64_t(p.gather[r]) : r, n = p.c_crow[i + 1] - p.c_crow[i];
      const int64_t where = p.shared_lists[r];
      const T *x = all_x + p.a_crow[i], *y = m.of_rows ? all_y : all_y + p.shared_lists[m.gather_rows + r];
      T* out = static_cast<T*>(m.out) + sample * m.c_nnz + p.c_crow[i];
      if (m.of_rows) {
        origin.clear();
        for (I e = p.a_crow[i]; e < p.a_crow[i + 1]; ++e) origin.push_back(p.b_crow[p.a_col[e]]);
      }
      // In variables of their own, which no store is feared to change.
      const I *left = p.left, *right = p.right + (p.starts ? 0 : where), *from = origin.data();
      if (!p.starts) {
        if (left) left += where;
        for (int64_t e = 0; e < n; ++e) {
          const int64_t l = left ? int64_t(left[e]) : e;
          out[e] = T(Acc(x[l]) * Acc(y[right[e] + (m.of_rows ? from[l] : I(0))]));
        }
        continue;
      }
      const I* starts = p.starts + where;
      const auto sums = [&](auto place) {
        for (int64_t e = 0; e < n; ++e) {
          Acc sum = 0;
          for (I s = starts[e]; s < starts[e + 1]; ++s) sum += Acc(x[left[s]]) * Acc(y[place(s)]);
          out[e] = T(sum);
        }
      };
      if (m.of_rows) {
        sums([=](I s) { return from[left[s]] + right[s]; });
      } else {
        sums([=](I s) { return right[s]; });
      }
    }
  });
}

template <typename I, typename T>
void axpy(const CsrMatmul& m) {
  using Acc = Accumulate<T>;
  const Indices<I> p(m);
  const auto combine = cpu::row_kernels().combine[int(m.dtype)];
  // The number of products is not known here; an element of a has a row of b.
  const int64_t work =
      m.axpy_rows * (1 + m.b_nnz / std::max<int64_t>(m.inner, 1)) * (1 + m.a_nnz / std::max<int64_t>(m.rows, 1));
  over_tiles(m.batch, m.axpy_rows, 16, work, [&](int64_t sample, int64_t begin, int64_t end) {
    const T* x = static_cast<const T*>(m.x) + sample * m.x_batch;
    const T* y = static_cast<const T*>(m.y) + sample * m.y_batch;
    T* out = static_cast<T*>(m.out) + sample * m.c_nnz;
    std::vector<int64_t> starts;
    std::vector<Acc> factors;
    for (int64_t r = begin; r < end; ++r) {
      const int64_t i = p.axpy[r];
      starts.clear(), factors.clear();
      for (I e = p.a_crow[i]; e < p.a_crow[i + 1]; ++e) {
        starts.push_back(p.b_crow[p.a_col[e]]);
        factors.push_back(Acc(x[e]));
      }
      combine(y, starts.data(), factors.data(), int64_t(starts.size()), p.c_crow[i + 1] - p.c_crow[i],
              out + p.c_crow[i]);
    }
  });
}

// Of `rows`: a core expands nothing, its workspace is as near.
template <typename I, typename T>
void accumulate(const CsrMatmul& m, const void* rows, int64_t count) {
  using Acc = Accumulate<T>;
  const Indices<I> p(m);
  const int64_t columns = p.columns(m);
  // The number of products is not known here; each element of a has a row of b.
  over_rows(m.batch, count, m.c_nnz + m.a_nnz * 8, [&](int64_t sample, int64_t begin, int64_t end) {
    const T* x = static_cast<const T*>(m.x) + sample * m.x_batch;
    const T* y = static_cast<const T*>(m.y) + sample * m.y_batch;
    T* out = static_cast<T*>(m.out) + sample * m.c_nnz;
    std::vector<Acc> row(columns);
    for (int64_t r = begin; r < end; ++r) {
      const int64_t i = static_cast<const I*>(rows)[r];
      for (I e = p.c_crow[i]; e < p.c_crow[i + 1]; ++e) row[p.c_col[e]] = 0;
      for (I e = p.a_crow[i]; e < p.a_crow[i + 1]; ++e) {
        const Acc factor = Acc(x[e]);
        for (I f = p.b_crow[p.a_col[e]]; f < p.b_crow[p.a_col[e] + 1]; ++f) row[p.b_col[f]] += factor * Acc(y[f]);
      }
      for (I e = p.c_crow[i]; e < p.c_crow[i + 1]; ++e) out[e] = T(row[p.c_col[e]]);
    }
  });
}

// Where samples are summed, a single set of sums runs over all of them.
struct Samples {
  int64_t sets, summed;
  explicit Samples(const CsrMatmul& m) : sets(m.shared ? 1 : m.batch), summed(m.shared ? m.batch : 1) {}
};

template <typename I, typename T>
void left(const CsrMatmul& m) {
  using Acc = Accumulate<T>;
  const Indices<I> p(m);
  const int64_t columns = p.columns(m);
  const Samples samples(m);
  over_rows(samples.sets, m.rows, (m.c_nnz + m.a_nnz * 8) * samples.summed,
            [&](int64_t set, int64_t begin, int64_t end) {
              T* out = static_cast<T*>(m.out) + set * m.a_nnz;
              std::vector<Acc> row(columns), sums;
              for (int64_t i = begin; i < end; ++i) {
                sums.assign(p.a_crow[i + 1] - p.a_crow[i], Acc(0));
                for (int64_t sample = set; sample < set + samples.summed; ++sample) {
                  const T* g = static_cast<const T*>(m.g) + sample * m.g_batch;
                  const T* y = static_cast<const T*>(m.y) + sample * m.y_batch;
                  for (I e = p.c_crow[i]; e < p.c_crow[i + 1]; ++e) row[p.c_col[e]] = Acc(g[e]);
                  for (I e = p.a_crow[i]; e < p.a_crow[i + 1]; ++e) {
                    Acc sum = 0;
                    for (I f = p.b_crow[p.a_col[e]]; f < p.b_crow[p.a_col[e] + 1]; ++f) {
                      sum += Acc(y[f]) * row[p.b_col[f]];
                    }
                    sums[e - p.a_crow[i]] += sum;
                  }
                }
                for (I e = p.a_crow[i]; e < p.a_crow[i + 1]; ++e) out[e] = T(sums[e - p.a_crow[i]]);
              }
            });
}

template <typename I, typename T>
void right(const CsrMatmul& m) {
  using Acc = Accumulate<T>;
  const Indices<I> p(m);
  const Samples samples(m);
  over_rows(samples.sets, m.inner, (m.b_nnz + m.c_nnz * 4) * samples.summed,
            [&](int64_t set, int64_t begin, int64_t end) {
              T* out = static_cast<T*>(m.out) + set * m.b_nnz;
              std::vector<Acc> sums;
              for (int64_t j = begin; j < end; ++j) {
                const I first = p.b_crow[j], n = p.b_crow[j + 1] - first;
                sums.assign(n, Acc(0));
                for (I s = p.t_crow[j]; n > 0 && s < p.t_crow[j + 1]; ++s) {
                  // The row of b is part of the row of the product: both are in order.
                  const I* at = p.c_col + p.c_crow[p.t_col[s]];
                  const I* last = p.c_col + p.c_crow[p.t_col[s] + 1];
                  for (I t = 0; t < n; ++t) {
                    at = std::lower_bound(at, last, p.b_col[first + t]);
                    for (int64_t sample = set; sample < set + samples.summed; ++sample) {
                      sums[t] += Acc(static_cast<const T*>(m.x)[sample * m.x_batch + p.t_index[s]]) *
                                 Acc(static_cast<const T*>(m.g)[sample * m.g_batch + (at - p.c_col)]);
                    }
                  }
                }
                for (I t = 0; t < n; ++t) out[first + t] = T(sums[t]);
              }
            });
}

}  // namespace

void csr_matmul_cpu(const CsrMatmul& m) {
  dispatch(m.wide, m.dtype, [&](auto* i, auto* t) {
    using I = std::remove_pointer_t<decltype(i)>;
    using T = std::remove_pointer_t<decltype(t)>;
    if (m.gather_elements > 0) gather<I, T>(m);
    if (m.gather_rows > 0) shared_lists<I, T>(m);
    if (m.axpy_rows > 0) axpy<I, T>(m);
    if (m.accumulate_rows > 0) accumulate<I, T>(m, m.accumulate, m.accumulate_rows);
    if (m.expand_rows > 0) accumulate<I, T>(m, m.expand, m.expand_rows);
  });
}

void csr_matmul_left_cpu(const CsrMatmul& m) {
  dispatch(m.wide, m.dtype,
           [&](auto* i, auto* t) { left<std::remove_pointer_t<decltype(i)>, std::remove_pointer_t<decltype(t)>>(m); });
}

void csr_matmul_right_cpu(const CsrMatmul& m) {
  dispatch(m.wide, m.dtype,
           [&](auto* i, auto* t) { right<std::remove_pointer_t<decltype(i)>, std::remove_pointer_t<decltype(t)>>(m); });
}

}  // namespace weft::sparse
