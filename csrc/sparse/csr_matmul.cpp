// csr_matmul_plan; checks and allocation of the numeric ops, for both devices; CPU registration.
#include "sparse/csr_matmul.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <torch/library.h>

#include <tuple>

#include "common/tensor.h"
#include "sparse/csr_transpose.h"
#include "sparse/plan.h"
#include "sparse/tensors.h"
#include "sparse/types.h"

namespace weft::sparse {
namespace {

using Plan = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// Parts of the rows that are worth a thread and a marker array of its own.
template <typename F>
void over_rows_of(int64_t rows, int64_t products, F&& f) {
  const int64_t grain = std::max<int64_t>(1, (1 << 18) * rows / std::max<int64_t>(products, 1));
  at::parallel_for(0, rows, grain, f);
}

template <typename I>
Csr<I> csr(const at::Tensor& crow, const at::Tensor& col) {
  Csr<I> m{crow.const_data_ptr<I>(), col.const_data_ptr<I>(), crow.size(0) - 1, 0};
  for (int64_t i = 0; i < m.rows; ++i) {
    if (m.crow[i + 1] > m.crow[i]) m.columns = std::max<int64_t>(m.columns, int64_t(m.col[m.crow[i + 1] - 1]) + 1);
  }
  return m;
}

template <typename I>
Plan plan(const at::Tensor& a_crow, const at::Tensor& a_col, const at::Tensor& b_crow, const at::Tensor& b_col,
          int64_t products, bool listable) {
  const auto a = csr<I>(a_crow, a_col), b = csr<I>(b_crow, b_col);
  const auto options = a_crow.options();
  at::Tensor crow = at::empty({a.rows + 1}, options);
  I* c_crow = crow.mutable_data_ptr<I>();
  c_crow[0] = 0;
  over_rows_of(a.rows, products, [&](int64_t begin, int64_t end) {
    Symbolic<I> symbolic(a, b);
    for (int64_t i = begin; i < end; ++i) c_crow[i + 1] = I(symbolic.columns(i).size());
  });
  bool single = true;  // rows of a have one element at most
  for (int64_t i = 0; i < a.rows; ++i) {
    c_crow[i + 1] += c_crow[i];
    single = single && a.crow[i + 1] - a.crow[i] <= 1;
  }
  const int64_t nnz = c_crow[a.rows];
  at::Tensor col = at::empty({nnz}, options);
  I* c_col = col.mutable_data_ptr<I>();
  over_rows_of(a.rows, products, [&](int64_t begin, int64_t end) {
    Symbolic<I> symbolic(a, b);
    for (int64_t i = begin; i < end; ++i) {
      const auto& found = symbolic.columns(i);
      std::copy(found.begin(), found.end(), c_col + c_crow[i]);
    }
  });

  at::Tensor starts = at::empty({0}, options), left = starts, right = starts;
  const bool one_each = products == nnz;
  // What the operands and the product take in float32, twice, less the pattern: what lists may take.
  const int64_t element = sizeof(I) + 4, stored = a_col.size(0) + b_col.size(0) + nnz;
  const int64_t budget = 2 * element * stored - int64_t(sizeof(I)) * (nnz + a.rows + 1);
  const int64_t lists = int64_t(sizeof(I)) * (one_each ? products * 2 : nnz + 1 + 2 * products);
  Kind kind = Kind::found;
  if (single && products >= 16 * a.rows) {
    kind = Kind::copied;
  } else if (listable && (lists <= budget || products == 0)) {
    kind = Kind::listed;
    const auto c = csr<I>(crow, col);
    at::Tensor all = at::empty({nnz + 1}, options);
    left = at::empty({products}, options), right = at::empty({products}, options);
    I *s = all.mutable_data_ptr<I>(), *l = left.mutable_data_ptr<I>(), *r = right.mutable_data_ptr<I>();
    std::vector<I> first(a.rows + 1, 0);
    for (int64_t i = 0; i < a.rows; ++i) first[i + 1] = first[i] + I(count_products(a, b, i));
    s[nnz] = I(products);
    over_rows_of(a.rows, products, [&](int64_t begin, int64_t end) {
      std::vector<I> place(b.columns);
      for (int64_t i = begin; i < end; ++i) list_products(a, b, c, i, place, s, l, r, first[i]);
    });
    if (!one_each) starts = all;
    bool same = products == a_col.size(0);
    for (int64_t p = 0; same && p < products; ++p) same = l[p] == p;
    if (same) left = at::empty({0}, options);
  }
  return {crow, col, starts, left, right, at::tensor({int64_t(kind), products}, at::kLong)};
}

Plan csr_matmul_plan(at::TensorList a, at::TensorList b) {
  constexpr const char* kOp = "csr_matmul_plan";
  TORCH_CHECK_VALUE(!a.empty() && !b.empty(), kOp, ": a and b must be [crow, col]");
  check_pattern(kOp, "a", a, false, a[0]);
  check_pattern(kOp, "b", b, false, a[0]);
  const bool wide = is_wide(a[0]) || is_wide(b[0]);
  const auto device = a[0].device();
  auto here = [](const at::Tensor& t, at::ScalarType type) { return t.to(at::kCPU, type).contiguous(); };
  auto ready = [&](at::ScalarType type) {
    return std::array<at::Tensor, 4>{here(a[0], type), here(a[1], type), here(b[0], type), here(b[1], type)};
  };
  auto count = [&](const std::array<at::Tensor, 4>& t, auto* i) {
    using I = std::remove_pointer_t<decltype(i)>;
    const auto left = csr<I>(t[0], t[1]), right = csr<I>(t[2], t[3]);
    int64_t products = 0;
    for (int64_t row = 0; row < left.rows; ++row) products += count_products(left, right, row);
    return products;
  };
  auto t = ready(wide ? at::kLong : at::kInt);
  int64_t products = 0;
  with_index(wide, [&](auto* i) { products = count(t, i); });
  TORCH_CHECK(
      products <= kMaxProducts, "plan_matmul: the product takes ", products,
      " scalar products a sample, more than the ", kMaxProducts,
      " that a plan is made for; products of Jacobian and vector (schedule \"linear\") need one per stored element");
  // The product may have as many elements: all is counted in int64, without lists, and narrowed where it fits after
  // all.
  const bool grows = !wide && products > std::numeric_limits<int32_t>::max();
  if (grows) t = ready(at::kLong);
  Plan made;
  with_index(wide || grows, [&](auto* i) {
    made = plan<std::remove_pointer_t<decltype(i)>>(t[0], t[1], t[2], t[3], products, !grows);
  });
  auto& [crow, col, starts, left, right, info] = made;
  const bool narrow = grows && col.size(0) <= std::numeric_limits<int32_t>::max();
  auto there = [&](const at::Tensor& p) { return p.to(device, narrow ? at::kInt : p.scalar_type()); };
  return {there(crow), there(col), there(starts), there(left), there(right), info};
}

constexpr size_t kPatterns = 9, kWithTransposed = 12;

CsrMatmul describe(const char* op, at::TensorList p, int64_t kind, const at::Tensor& like) {
  check_floating(op, "values", like);
  TORCH_CHECK_VALUE(p.size() == kPatterns || p.size() == kWithTransposed, op,
                    ": patterns must be 9 or 12 tensors, got ", p.size());
  check_indices(op, "patterns", p, like);
  TORCH_CHECK_VALUE(kind >= 0 && kind <= 2, op, ": kind must be 0, 1 or 2, got ", kind);
  CsrMatmul m{};
  m.dtype = dtype_of(like), m.kind = Kind(kind), m.wide = is_wide(p[0]);
  m.rows = p[0].size(0) - 1, m.inner = p[2].size(0) - 1;
  m.a_nnz = p[1].size(0), m.b_nnz = p[3].size(0), m.c_nnz = p[5].size(0);
  auto data = [&](size_t i) { return p[i].numel() > 0 ? p[i].const_data_ptr() : nullptr; };
  m.a_crow = data(0), m.a_col = data(1), m.b_crow = data(2), m.b_col = data(3), m.c_crow = data(4), m.c_col = data(5);
  m.starts = data(6), m.left = data(7), m.right = data(8);
  if (p.size() == kWithTransposed) m.t_crow = data(9), m.t_col = data(10), m.t_index = data(11);
  return m;
}

// One operand: its values, its size, and where the kernel finds both.
void operand(const char* op, const char* name, const at::Tensor& values, const at::Tensor& like, int64_t nnz,
             Batch& batch, at::Tensor& kept, const void*& data, int64_t& stride) {
  check_like(op, name, values, "the other operand", like);
  TORCH_CHECK_VALUE((values.dim() == 1 || values.dim() == 2) && values.size(-1) == nnz, op, ": ", name,
                    " must be (nnz,) or (B, nnz) with nnz = ", nnz, ", got ", values.sizes());
  batch.join(op, name, values.dim() == 2, values.size(0));
  kept = values.contiguous();
  data = kept.numel() > 0 ? kept.const_data_ptr() : nullptr;
  stride = values.dim() == 2 ? nnz : 0;
}

at::Tensor run_into(RunMatmul run, CsrMatmul& m, const Batch& batch, bool shared, int64_t nnz, const at::Tensor& like) {
  m.batch = batch.size < 0 ? 1 : batch.size, m.shared = shared || batch.size < 0;
  at::Tensor out = m.shared ? at::empty({nnz}, like.options()) : at::empty({m.batch, nnz}, like.options());
  if (out.numel() == 0) return out;
  m.out = out.mutable_data_ptr();
  run(m);
  return out;
}

}  // namespace

at::Tensor csr_matmul_forward(RunMatmul run, at::TensorList patterns, int64_t kind, const at::Tensor& x,
                              const at::Tensor& y) {
  CsrMatmul m = describe("csr_matmul", patterns, kind, x);
  Batch batch;
  at::Tensor kept_x, kept_y;
  operand("csr_matmul", "x", x, x, m.a_nnz, batch, kept_x, m.x, m.x_batch);
  operand("csr_matmul", "y", y, x, m.b_nnz, batch, kept_y, m.y, m.y_batch);
  return run_into(run, m, batch, false, m.c_nnz, x);
}

at::Tensor csr_matmul_left_forward(RunMatmul run, at::TensorList patterns, int64_t kind, const at::Tensor& y,
                                   const at::Tensor& g, bool shared) {
  CsrMatmul m = describe("csr_matmul_left", patterns, kind, y);
  Batch batch;
  at::Tensor kept_y, kept_g;
  operand("csr_matmul_left", "y", y, y, m.b_nnz, batch, kept_y, m.y, m.y_batch);
  operand("csr_matmul_left", "g", g, y, m.c_nnz, batch, kept_g, m.g, m.g_batch);
  return run_into(run, m, batch, shared, m.a_nnz, y);
}

at::Tensor csr_matmul_right_forward(RunMatmul run, at::TensorList patterns, int64_t kind, const at::Tensor& x,
                                    const at::Tensor& g, bool shared) {
  std::vector<at::Tensor> all = patterns.vec();
  TORCH_CHECK_VALUE(all.size() >= kPatterns, "csr_matmul_right: patterns must be 9 or 12 tensors, got ", all.size());
  if (all.size() == kPatterns) {
    auto [crow, col, index] = csr_transpose(all[0], all[1], all[2].size(0) - 1);
    all.insert(all.end(), {crow, col, index});
  }
  CsrMatmul m = describe("csr_matmul_right", all, kind, x);
  Batch batch;
  at::Tensor kept_x, kept_g;
  operand("csr_matmul_right", "x", x, x, m.a_nnz, batch, kept_x, m.x, m.x_batch);
  operand("csr_matmul_right", "g", g, x, m.c_nnz, batch, kept_g, m.g, m.g_batch);
  return run_into(run, m, batch, shared, m.b_nnz, x);
}

namespace {

at::Tensor matmul_cpu(at::TensorList patterns, int64_t kind, const at::Tensor& x, const at::Tensor& y) {
  return csr_matmul_forward(csr_matmul_cpu, patterns, kind, x, y);
}

at::Tensor left_cpu(at::TensorList patterns, int64_t kind, const at::Tensor& y, const at::Tensor& g, bool shared) {
  return csr_matmul_left_forward(csr_matmul_left_cpu, patterns, kind, y, g, shared);
}

at::Tensor right_cpu(at::TensorList patterns, int64_t kind, const at::Tensor& x, const at::Tensor& g, bool shared) {
  return csr_matmul_right_forward(csr_matmul_right_cpu, patterns, kind, x, g, shared);
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CompositeExplicitAutograd, m) {
  m.impl("csr_matmul_plan", csr_matmul_plan);
}
TORCH_LIBRARY_IMPL(weft, CPU, m) {
  m.impl("csr_matmul", matmul_cpu);
  m.impl("csr_matmul_left", left_cpu);
  m.impl("csr_matmul_right", right_cpu);
}

}  // namespace weft::sparse
