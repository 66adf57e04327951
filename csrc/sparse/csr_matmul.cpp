// csr_matmul_plan; checks and allocation of the numeric ops, for both devices; CPU registration.
#include "sparse/csr_matmul.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <utility>

#include "common/tensor.h"
#include "sparse/csr_transpose.h"
#include "sparse/plan.h"
#include "sparse/product_plan.h"
#include "sparse/tensors.h"
#include "sparse/types.h"

namespace weft::sparse {
namespace {

using Plan = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor,
                        at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

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

// What a plan has beside the product's pattern.
struct Numeric {
  at::Tensor axpy, accumulate, gather, starts, left, right, shared, expand;
  int64_t axpy_products = 0, gather_products = 0, expand_products = 0;
};

template <typename I>
at::Tensor as_tensor(const std::vector<I>& numbers, const at::TensorOptions& options) {
  at::Tensor made = at::empty({int64_t(numbers.size())}, options);
  std::copy(numbers.begin(), numbers.end(), made.mutable_data_ptr<I>());
  return made;
}

// Puts lists that rows share in the place of each row's own, where that leaves a quarter of them or less.
template <typename I>
bool share_rows(const Csr<I>& a, const Csr<I>& b, const Csr<I>& c, const std::vector<RowKind>& kinds, bool all,
                bool gpu, Numeric& made) {
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < a.rows; ++i) {
    if (all || kinds[i] == RowKind::kGather) rows.push_back(i);
  }
  GatherTotals gather{int64_t(rows.size()), made.starts.size(0) - 1, made.gather_products, 0};
  for (const int64_t i : rows) gather.longest = std::max<int64_t>(gather.longest, c.crow[i + 1] - c.crow[i]);
  SharedLists<I> found;
  const auto shared = [&](bool of_rows) {
    return worth_sharing(gather, of_rows, gpu) &&
           share_lists(a, b, c, rows, made.starts.const_data_ptr<I>(), made.left.const_data_ptr<I>(),
                       made.right.const_data_ptr<I>(), of_rows, (gather.elements + 2 * gather.products) / 4, found);
  };
  if (!shared(false) && !shared(true)) return false;
  const auto options = made.starts.options();
  if (!all) {
    made.gather = at::empty({int64_t(rows.size())}, options);
    std::copy(rows.begin(), rows.end(), made.gather.mutable_data_ptr<I>());
  }
  found.where.insert(found.where.end(), found.base.begin(), found.base.end());
  made.starts = as_tensor(found.starts, options), made.left = as_tensor(found.left, options);
  made.right = as_tensor(found.right, options), made.shared = as_tensor(found.where, options);
  return true;
}

template <typename I>
Numeric plan_rows(const Csr<I>& a, const Csr<I>& b, const Csr<I>& c, const std::vector<RowCount>& counts,
                  const std::vector<RowKind>& kinds, bool gpu, const at::TensorOptions& options) {
  Numeric made;
  int64_t rows[5] = {}, elements = 0;
  std::vector<I> first_product(a.rows + 1, 0), first_element(a.rows + 1, 0);  // of the gathered rows before
  for (int64_t i = 0; i < a.rows; ++i) {
    const bool gather = kinds[i] == RowKind::kGather;
    ++rows[int(kinds[i])];
    if (kinds[i] == RowKind::kAxpy) made.axpy_products += counts[i].products;
    if (kinds[i] == RowKind::kExpand) made.expand_products += counts[i].products;
    made.gather_products += gather ? counts[i].products : 0;
    elements += gather ? counts[i].elements : 0;
    first_product[i + 1] = I(made.gather_products), first_element[i + 1] = I(elements);
  }
  made.axpy = at::empty({rows[int(RowKind::kAxpy)]}, options);
  made.accumulate = at::empty({rows[int(RowKind::kAccumulate)]}, options);
  made.expand = at::empty({rows[int(RowKind::kExpand)]}, options);
  const bool all = elements == c.crow[c.rows];
  made.gather = at::empty({all ? 0 : elements}, options);
  made.starts = at::empty({elements + 1}, options);
  made.left = at::empty({made.gather_products}, options), made.right = at::empty({made.gather_products}, options);
  I *axpy = made.axpy.mutable_data_ptr<I>(), *accumulate = made.accumulate.mutable_data_ptr<I>(),
    *expand = made.expand.mutable_data_ptr<I>(), *gather = made.gather.mutable_data_ptr<I>(),
    *starts = made.starts.mutable_data_ptr<I>(), *left = made.left.mutable_data_ptr<I>(),
    *right = made.right.mutable_data_ptr<I>();
  for (int64_t i = 0; i < a.rows; ++i) {
    if (kinds[i] == RowKind::kAxpy) *axpy++ = I(i);
    if (kinds[i] == RowKind::kAccumulate) *accumulate++ = I(i);
    if (kinds[i] == RowKind::kExpand) *expand++ = I(i);
    if (kinds[i] == RowKind::kGather && !all) {
      for (I e = c.crow[i]; e < c.crow[i + 1]; ++e) *gather++ = e;
    }
  }
  over_rows_of(a.rows, made.gather_products, [&](int64_t begin, int64_t end) {
    std::vector<I> place(b.columns);
    for (int64_t i = begin; i < end; ++i) {
      if (kinds[i] == RowKind::kGather) {
        list_products(a, b, c, i, place, starts + first_element[i], left, right, first_product[i]);
      }
    }
  });
  starts[elements] = I(made.gather_products);
  made.shared = at::empty({0}, options);
  if (share_rows(a, b, c, kinds, all, gpu, made)) return made;
  const auto none = [&] { return at::empty({0}, options); };  // results of an operator share no memory
  const bool single = made.gather_products == elements;
  if (single) made.starts = none();
  const auto in_order = [&](const I* numbers, int64_t stored) {
    bool same = made.gather_products == stored;
    for (int64_t p = 0; same && p < made.gather_products; ++p) same = numbers[p] == p;
    return same;
  };
  if (in_order(left, a.crow[a.rows])) made.left = none();
  if (all && single && in_order(right, b.crow[b.rows])) made.right = none();
  return made;
}

template <typename I>
Plan plan(const at::Tensor& a_crow, const at::Tensor& a_col, const at::Tensor& b_crow, const at::Tensor& b_col,
          int64_t products, bool listable, bool gpu) {
  const auto a = csr<I>(a_crow, a_col), b = csr<I>(b_crow, b_col);
  const auto options = a_crow.options();
  at::Tensor crow = at::empty({a.rows + 1}, options);
  I* c_crow = crow.mutable_data_ptr<I>();
  c_crow[0] = 0;
  std::vector<RowCount> counts(a.rows);
  std::optional<KeptColumns<I>> kept(std::in_place, a.rows, kept_bytes());
  over_rows_of(a.rows, products, [&](int64_t begin, int64_t end) {
    Symbolic<I> symbolic(a, b);
    for (int64_t i = begin; i < end; ++i) {
      const std::vector<I>& found = symbolic.columns(i);
      counts[i] = count_row(a, b, i, int64_t(found.size()));
      c_crow[i + 1] = I(counts[i].elements);
      kept->keep(i, found);
    }
  });
  for (int64_t i = 0; i < a.rows; ++i) c_crow[i + 1] += c_crow[i];
  const int64_t nnz = c_crow[a.rows];
  at::Tensor col = at::empty({nnz}, options);
  I* c_col = col.mutable_data_ptr<I>();
  over_rows_of(a.rows, products, [&](int64_t begin, int64_t end) {
    std::optional<Symbolic<I>> symbolic;
    for (int64_t i = begin; i < end; ++i) {
      const std::vector<I>* found = kept->find(i, counts[i].elements);
      if (found == nullptr) {
        if (!symbolic) symbolic.emplace(a, b);
        found = &symbolic->columns(i);
      }
      std::copy(found->begin(), found->end(), c_col + c_crow[i]);
    }
  });
  kept.reset();

  // Twice what the operands and the product take in float32, less the pattern, is left for lists.
  const int64_t stored = a_col.size(0) + b_col.size(0) + nnz;
  const int64_t bytes = 2 * int64_t(sizeof(I) + 4) * stored - int64_t(sizeof(I)) * (nnz + a.rows + 1);
  auto kinds = choose_kinds(counts, listable ? bytes / int64_t(sizeof(I)) - 1 : -1);
  Expansion<I> expansion;
  std::vector<I> narrow;
  const int64_t narrow_bytes = 2 * int64_t(sizeof(I)) * (b.rows + a.rows);  // with the numbers of rows
  if (gpu && listable && worth_narrow(b.columns, products, a_col.size(0), nnz) && narrow_bytes <= bytes) {
    narrow = list_narrow(b);
    for (RowKind& kind : kinds) kind = kind == RowKind::kEmpty ? kind : RowKind::kAccumulate;
  } else if (gpu && listable) {
    auto expanded = choose_expanded(counts, kinds);
    const int64_t rows = std::count(expanded.begin(), expanded.end(), RowKind::kExpand);
    if (rows > 0 &&
        Expander<I>(a, b, csr<I>(crow, col), expansion).expand(expanded, counts, bytes - int64_t(sizeof(I)) * rows)) {
      kinds = std::move(expanded);
    } else {
      expansion = {};
    }
  }
  const Numeric made = plan_rows(a, b, csr<I>(crow, col), counts, kinds, gpu, options);
  expansion.left.insert(expansion.left.end(), expansion.right.begin(), expansion.right.end());
  return {crow,
          col,
          made.axpy,
          made.accumulate,
          made.gather,
          made.starts,
          made.left,
          made.right,
          made.shared,
          made.expand,
          as_tensor(expansion.pieces, options),
          as_tensor(expansion.left, options),
          as_tensor(expansion.lists, options.dtype(at::kShort)),
          as_tensor(narrow, options),
          at::tensor({products, made.axpy_products, made.gather_products, made.expand_products}, at::kLong)};
}

Plan csr_matmul_plan(at::TensorList a, at::TensorList b, std::optional<bool> gpu) {
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
    made = plan<std::remove_pointer_t<decltype(i)>>(t[0], t[1], t[2], t[3], products, !grows,
                                                    gpu.value_or(device.is_cuda()));
  });
  auto& [crow, col, axpy, accumulate, gather, starts, left, right, shared, expand, pieces, segments, lists, narrow_rows,
         info] = made;
  const bool narrow = grows && col.size(0) <= std::numeric_limits<int32_t>::max();
  auto there = [&](const at::Tensor& p) { return p.to(device, narrow ? at::kInt : p.scalar_type()); };
  return {there(crow),   there(col),      there(axpy),      there(accumulate),  there(gather),
          there(starts), there(left),     there(right),     there(shared),      there(expand),
          there(pieces), there(segments), lists.to(device), there(narrow_rows), info};
}

CsrMatmul describe(const char* op, const ProductPlan& p, const at::Tensor& like) {
  check_floating(op, "values", like);
  check_indices(op, "patterns", {p.a_crow, p.a_col, p.b_crow, p.b_col, p.crow, p.col}, like);
  check_indices(op, "patterns", {p.a_crow, p.axpy, p.accumulate, p.gather, p.starts, p.left, p.right, p.shared}, like);
  check_indices(op, "patterns", {p.a_crow, p.expand, p.pieces, p.segments, p.narrow}, like);
  TORCH_CHECK_VALUE(p.lists.scalar_type() == at::kShort && p.lists.device() == like.device() && p.lists.is_contiguous(),
                    op, ": the lists of pieces must be int16 on ", like.device());
  TORCH_CHECK_VALUE(p.pieces.numel() % kPieceNumbers == 0 &&
                        (p.narrow.numel() == 0 || p.narrow.numel() == 2 * (p.b_crow.size(0) - 1)),
                    op, ": patterns must be of a plan, got ", p.pieces.numel(), " numbers of pieces and ",
                    p.narrow.numel(), " of rows of few columns");
  CsrMatmul m{};
  m.dtype = dtype_of(like), m.wide = is_wide(p.a_crow);
  m.rows = p.a_crow.size(0) - 1, m.inner = p.b_crow.size(0) - 1;
  m.a_nnz = p.a_col.size(0), m.b_nnz = p.b_col.size(0), m.c_nnz = p.col.size(0);
  const auto data = [](const at::Tensor& t) { return t.numel() > 0 ? t.const_data_ptr() : nullptr; };
  m.a_crow = data(p.a_crow), m.a_col = data(p.a_col), m.b_crow = data(p.b_crow), m.b_col = data(p.b_col);
  m.c_crow = data(p.crow), m.c_col = data(p.col);
  m.axpy = data(p.axpy), m.accumulate = data(p.accumulate), m.gather = data(p.gather);
  m.starts = data(p.starts), m.left = data(p.left), m.right = data(p.right), m.shared_lists = data(p.shared);
  m.axpy_rows = p.axpy.size(0), m.accumulate_rows = p.accumulate.size(0);
  m.expand = data(p.expand), m.expand_rows = p.expand.size(0);
  m.pieces = data(p.pieces), m.segments = data(p.segments), m.lists = static_cast<const int16_t*>(data(p.lists));
  m.piece_count = p.pieces.size(0) / kPieceNumbers, m.segment_count = p.segments.size(0) / 2;
  m.narrow = data(p.narrow);
  if (m.shared_lists) {
    m.gather_rows = m.gather ? p.gather.size(0) : m.rows;
    m.of_rows = p.shared.size(0) == m.gather_rows;
    TORCH_CHECK_VALUE(!like.is_cuda() || (m.starts && !m.of_rows), op, ": patterns must be of a plan for a GPU");
  } else if (m.left || m.right || (m.axpy_rows == 0 && m.accumulate_rows == 0 && m.expand_rows == 0)) {
    m.gather_elements = m.gather ? p.gather.size(0) : m.c_nnz;
    m.gather_products = m.left || m.right ? std::max(p.left.size(0), p.right.size(0)) : m.c_nnz;
  }
  if (p.t_crow.defined()) {
    check_indices(op, "patterns", {p.a_crow, p.t_crow, p.t_col, p.t_index}, like);
    m.t_crow = data(p.t_crow), m.t_col = data(p.t_col), m.t_index = data(p.t_index);
  }
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

int64_t& kept_bytes() {
  static int64_t bytes = int64_t(1) << 28;
  return bytes;
}

at::Tensor csr_matmul_forward(RunMatmul run, at::TensorList patterns, const at::Tensor& x, const at::Tensor& y) {
  CsrMatmul m = describe("csr_matmul", ProductPlan::of("csr_matmul", patterns), x);
  Batch batch;
  at::Tensor kept_x, kept_y;
  operand("csr_matmul", "x", x, x, m.a_nnz, batch, kept_x, m.x, m.x_batch);
  operand("csr_matmul", "y", y, x, m.b_nnz, batch, kept_y, m.y, m.y_batch);
  return run_into(run, m, batch, false, m.c_nnz, x);
}

at::Tensor csr_matmul_left_forward(RunMatmul run, at::TensorList patterns, const at::Tensor& y, const at::Tensor& g,
                                   bool shared) {
  CsrMatmul m = describe("csr_matmul_left", ProductPlan::of("csr_matmul_left", patterns), y);
  Batch batch;
  at::Tensor kept_y, kept_g;
  operand("csr_matmul_left", "y", y, y, m.b_nnz, batch, kept_y, m.y, m.y_batch);
  operand("csr_matmul_left", "g", g, y, m.c_nnz, batch, kept_g, m.g, m.g_batch);
  return run_into(run, m, batch, shared, m.a_nnz, y);
}

at::Tensor csr_matmul_right_forward(RunMatmul run, at::TensorList patterns, const at::Tensor& x, const at::Tensor& g,
                                    bool shared) {
  ProductPlan plan = ProductPlan::of("csr_matmul_right", patterns);
  if (!plan.t_crow.defined()) {
    std::tie(plan.t_crow, plan.t_col, plan.t_index) = csr_transpose(plan.a_crow, plan.a_col, plan.b_crow.size(0) - 1);
  }
  CsrMatmul m = describe("csr_matmul_right", plan, x);
  Batch batch;
  at::Tensor kept_x, kept_g;
  operand("csr_matmul_right", "x", x, x, m.a_nnz, batch, kept_x, m.x, m.x_batch);
  operand("csr_matmul_right", "g", g, x, m.c_nnz, batch, kept_g, m.g, m.g_batch);
  return run_into(run, m, batch, shared, m.b_nnz, x);
}

namespace {

at::Tensor matmul_cpu(at::TensorList patterns, const at::Tensor& x, const at::Tensor& y) {
  return csr_matmul_forward(csr_matmul_cpu, patterns, x, y);
}

at::Tensor left_cpu(at::TensorList patterns, const at::Tensor& y, const at::Tensor& g, bool shared) {
  return csr_matmul_left_forward(csr_matmul_left_cpu, patterns, y, g, shared);
}

at::Tensor right_cpu(at::TensorList patterns, const at::Tensor& x, const at::Tensor& g, bool shared) {
  return csr_matmul_right_forward(csr_matmul_right_cpu, patterns, x, g, shared);
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
