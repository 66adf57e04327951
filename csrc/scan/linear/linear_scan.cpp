// Checks, allocation and the gradients of linear_scan, for both devices.
#include "scan/linear/linear_scan.h"

#include <ATen/Context.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "common/check.h"

namespace weft::scan {
namespace {

constexpr const char* kOp = "linear_scan";

enum class Layout { dense, shared, diagonal, constant };

Layout check_sizes(const at::Tensor& A, const at::Tensor& b, const at::Tensor& x0, bool batch_first) {
  TORCH_CHECK_VALUE(b.dim() == 3, kOp, ": b must be ", batch_first ? "(B, T, H)" : "(T, B, H)", ", got ", b.sizes(),
                    "; ", batch_first ? "batch" : "time", " is first");
  const int64_t T = b.size(batch_first), B = b.size(!batch_first), H = b.size(2);
  if (x0.defined() && x0.sizes() != at::IntArrayRef({H})) {
    TORCH_CHECK_VALUE(x0.sizes() == at::IntArrayRef({B, H}), kOp,
                      ": x0 must be (B, H), or (H) shared by the batch, = ", at::IntArrayRef({B, H}), ", got ",
                      x0.sizes(), "; b is ", batch_first ? "(B, T, H), batch first" : "(T, B, H), time first");
  }
  if (A.dim() == 3 && A.sizes() == b.sizes()) return Layout::diagonal;
  const int64_t steps = A.dim() >= 3 ? A.size(batch_first) : 0, rows = A.dim() >= 3 ? A.size(!batch_first) : 0;
  const bool matrices = A.dim() == 4 && steps == T && A.size(2) == H && A.size(3) == H;
  if (matrices && rows == B) return Layout::dense;
  if (matrices && rows == 1) return Layout::shared;
  if (!batch_first && A.dim() == 3 && A.sizes() == at::IntArrayRef({T, H, H})) return Layout::shared;
  if (A.dim() == 1 && A.size(0) == H) return Layout::constant;
  if (A.dim() == 3 && steps == 1 && (rows == B || rows == 1) && A.size(2) == H) return Layout::constant;
  TORCH_CHECK_VALUE(
      !batch_first, kOp, ": A must be (B, T, H, H) = [", B, ", ", T, ", ", H, ", ", H,
      "], (1, T, H, H) shared by the batch, (B, T, H) diagonal, or (H), (B, 1, H) or (1, 1, H) diagonal and ",
      "constant in time, to go with b ", b.sizes(), "; got ", A.sizes(), "; b is (B, T, H), batch first");
  TORCH_CHECK_VALUE(false, kOp, ": A must be (T, B, H, H) = [", T, ", ", B, ", ", H, ", ", H,
                    "], (T, H, H) or (T, 1, H, H) shared by the batch, (T, B, H) diagonal, or (H), (1, B, H) or ",
                    "(1, 1, H) diagonal and constant in time, to go with b ", b.sizes(), "; got ", A.sizes(),
                    "; b is (T, B, H), time first");
}

bool is_diagonal(Layout layout) {
  return layout == Layout::diagonal || layout == Layout::constant;
}

Layout check(const at::Tensor& A, const at::Tensor& b, const at::Tensor& x0, bool batch_first) {
  const auto type = A.scalar_type();
  const bool is_complex = type == at::kComplexFloat || type == at::kComplexDouble;
  TORCH_CHECK_TYPE(
      is_complex || type == at::kHalf || type == at::kBFloat16 || type == at::kFloat || type == at::kDouble, kOp,
      ": A must be float16, bfloat16, float32, float64, complex64 or complex128, got ", type);
  check_like(kOp, "b", b, "A", A);
  if (x0.defined()) check_like(kOp, "x0", x0, "A", A);
  const Layout layout = check_sizes(A, b, x0, batch_first);
  TORCH_CHECK_TYPE(!is_complex || is_diagonal(layout), kOp, ": A must be diagonal where it is complex, got ", type,
                   " of ", A.sizes());
  return layout;
}

// A view with time first, and back.
at::Tensor turned(const at::Tensor& t, bool batch_first) {
  return batch_first && t.defined() && t.dim() >= 3 ? t.transpose(0, 1) : t;
}

// New memory for a tensor with time first, contiguous as its caller sees it.
at::Tensor empty_steps(at::IntArrayRef sizes, const at::TensorOptions& options, bool batch_first) {
  if (!batch_first || sizes.size() < 3) return at::empty(sizes, options);
  std::vector<int64_t> other = sizes.vec();
  std::swap(other[0], other[1]);
  return at::empty(other, options).transpose(0, 1);
}

// A with its dimensions of time and batch, as a view: (T, B, H), (T, B, H, H) or (T, 1, H, H).
at::Tensor every_step(const at::Tensor& A, Layout layout, const at::Tensor& b) {
  if (layout == Layout::constant) return A.contiguous().expand(b.sizes());
  return layout == Layout::shared && A.dim() == 3 ? A.unsqueeze(1) : A;
}

// x0 for every row, as a view.
at::Tensor every_row(const at::Tensor& x0, const at::Tensor& b) {
  return x0.defined() && x0.dim() == 1 ? x0.contiguous().expand({b.size(1), b.size(2)}) : x0;
}

// The stride of a dimension of size 1 is never used, and torch allows any number there: an honest one lets kernels
// merge dimensions and see alignment.
int64_t stride(const at::Tensor& t, int64_t dim, int64_t if_single) {
  return t.size(dim) == 1 ? if_single : t.stride(dim);
}

}  // namespace

at::ScalarType state_type(const at::Tensor& t) {
  const auto type = t.scalar_type();
  return type == at::kHalf || type == at::kBFloat16 ? at::kFloat : type;
}

Described describe(Problem p, const at::Tensor& out) {
  const int64_t T = p.b.size(0), B = p.b.size(1), H = p.b.size(2);
  // A 1 x 1 matrix is a diagonal, and the diagonal kernel reads it once.
  if (!p.diagonal && H == 1) {
    p.A = p.A.squeeze(-1).expand({T, B, 1});
    p.diagonal = true;
  }
  auto unit = [](const at::Tensor& t, int64_t dim) { return t.size(dim) == 1 || t.stride(dim) == 1; };
  // A pair of numbers is loaded at once.
  auto whole = [](at::Tensor& t) {
    if (t.defined() && t.is_complex() && reinterpret_cast<uintptr_t>(t.data_ptr()) % t.element_size()) t = t.clone();
  };
  whole(p.A), whole(p.b), whole(p.x0);
  if (!(unit(p.A, -1) || (!p.diagonal && unit(p.A, -2)))) p.A = p.A.contiguous();
  if (!unit(p.b, -1)) p.b = p.b.contiguous();
  if (p.x0.defined() && !unit(p.x0, -1)) p.x0 = p.x0.contiguous();

  LinearScan s{};
  s.T = T, s.B = B, s.H = H;
  s.dtype = dtype_of(p.b);
  const int64_t matrix = p.diagonal ? H : H * H;
  s.A_b = p.A.size(1) == B ? stride(p.A, 1, matrix) : 0;
  s.A_t = stride(p.A, 0, p.A.size(1) * matrix);
  if (p.diagonal) {
    s.A_row = 1, s.A_col = 0;
  } else {
    s.A_row = p.A.stride(2), s.A_col = p.A.stride(3);
    if (p.transpose) std::swap(s.A_row, s.A_col);
  }
  s.b_t = stride(p.b, 0, B * H), s.b_b = stride(p.b, 1, H);
  s.out_t = stride(out, 0, B * H), s.out_b = stride(out, 1, H);
  const int64_t size = p.b.element_size();
  auto start = [&](const at::Tensor& t, int64_t& t_stride) {
    auto* base = static_cast<char*>(t.data_ptr());
    if (!p.reverse) return base;
    base += (T - 1) * t_stride * size;
    t_stride = -t_stride;
    return base;
  };
  s.A = start(p.A, s.A_t);
  s.b = start(p.b, s.b_t);
  s.out = start(out, s.out_t);
  if (p.x0.defined()) {
    s.x0 = p.x0.data_ptr();
    s.x0_b = stride(p.x0, 0, H);
  }
  return {std::move(p), s};
}

DescribedGradients describe(DiagonalBackward p) {
  Described lambda =
      describe(Problem{p.A, p.grad, at::Tensor(), true, !p.reverse, false}, p.grad_b.defined() ? p.grad_b : p.grad);
  p.A = lambda.problem.A, p.grad = lambda.problem.b;
  for (at::Tensor* t : {&p.x, &p.x0}) {
    if (t->defined() && t->is_complex() && reinterpret_cast<uintptr_t>(t->data_ptr()) % t->element_size()) {
      *t = t->clone();
    }
  }
  if (p.x0.defined() && p.x0.size(1) != 1 && p.x0.stride(1) != 1) p.x0 = p.x0.contiguous();
  if (p.grad_A.defined() && p.x.size(2) != 1 && p.x.stride(2) != 1) p.x = p.x.contiguous();
  DiagonalGradients g{};
  LinearScan& s = g.scan;
  s = lambda.args;
  const int64_t size = p.grad.element_size(), T = s.T, B = s.B, H = s.H;
  s.A = static_cast<const char*>(s.A) - s.A_t * size;
  if (!p.grad_b.defined()) s.out = nullptr;
  auto turned = [&](const at::Tensor& t, int64_t& t_stride, int64_t& b_stride) {
    t_stride = stride(t, 0, B * H), b_stride = stride(t, 1, H);
    auto* base = static_cast<char*>(t.data_ptr());
    if (!p.reverse) base += (T - 1) * t_stride * size, t_stride = -t_stride;
    return base;
  };
  if (p.x0.defined()) g.x0 = p.x0.data_ptr(), g.x0_b = stride(p.x0, 0, H);
  if (p.grad_A.defined()) {
    const char* const x = turned(p.x, g.x_t, g.x_b);
    g.x = x + g.x_t * size;
    g.summed = p.grad_A.dim() == 2;
    if (g.summed) {
      g.grad_A = p.grad_A.data_ptr();
    } else {
      g.grad_A = turned(p.grad_A, g.grad_A_t, g.grad_A_b);
    }
  }
  if (p.grad_x0.defined()) {
    g.grad_x0 = p.grad_x0.data_ptr();
    g.wide_x0 = p.grad_x0.element_size() != size;
  }
  return {std::move(p), g};
}

at::Tensor linear_scan_forward(ScanInto scan, const at::Tensor& A, const at::Tensor& b,
                               const std::optional<at::Tensor>& x0, bool reverse, bool transpose, bool batch_first) {
  // A backward pass may run inside autocast, which would narrow what ATen operations of the kernels are given.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const at::Tensor start = x0.value_or(at::Tensor());
  const Layout layout = check(A, b, start, batch_first);
  at::Tensor out = at::empty(b.sizes(), b.options());
  if (out.numel() == 0) return out;
  const at::Tensor steps = turned(b, batch_first);
  scan({every_step(turned(A, batch_first), layout, steps), steps, every_row(start, steps), is_diagonal(layout), reverse,
        transpose},
       turned(out, batch_first));
  return out;
}

namespace {

// Sums a gradient over the dimensions that its argument does not have, or has with size 1.
at::Tensor summed_to(const at::Tensor& gradient, const at::Tensor& argument) {
  return gradient.sum_to_size(argument.sizes()).to(argument.scalar_type());
}

Gradients diagonal_gradients(GradientsInto gradients, const at::Tensor& grad, const at::Tensor& A, const at::Tensor& x,
                             const at::Tensor& x0, Layout layout, bool reverse, std::array<bool, 3> wanted,
                             bool batch_first) {
  const auto state = grad.options().dtype(state_type(grad));
  const int64_t B = grad.size(1), H = grad.size(2);
  const bool constant = layout == Layout::constant, one_x0 = x0.defined() && x0.dim() == 1;
  DiagonalBackward p{grad, every_step(A, layout, grad), x, every_row(x0, grad), reverse, {}, {}, {}};
  if (wanted[0])
    p.grad_A = constant ? at::empty({B, H}, state) : empty_steps(grad.sizes(), grad.options(), batch_first);
  if (wanted[1]) p.grad_b = empty_steps(grad.sizes(), grad.options(), batch_first);
  if (wanted[2]) p.grad_x0 = at::empty({B, H}, one_x0 ? state : grad.options());
  gradients(p);
  if (wanted[0] && constant) p.grad_A = summed_to(p.grad_A.unsqueeze(0), A);
  if (wanted[2] && one_x0) p.grad_x0 = summed_to(p.grad_x0, x0);
  return {p.grad_A, p.grad_b, p.grad_x0};
}

// The gradients of a dense scan, and of a diagonal one where the device has no kernel for them; with time first.
Gradients gradients_by_products(ScanInto scan, const at::Tensor& grad, const at::Tensor& A, const at::Tensor& x,
                                const at::Tensor& start, Layout layout, bool reverse, bool transpose, bool want_A,
                                bool want_x0, bool batch_first) {
  const bool diagonal = is_diagonal(layout);
  at::Tensor grad_A, grad_x0;
  at::Tensor lambda = empty_steps(grad.sizes(), grad.options(), batch_first);
  // Products below are gradients of fp32 products, which never use TF32.
  const at::NoTF32Guard no_tf32;
  // Sums of half-precision products are float sums throughout: at::bmm may split a sum and round its parts.
  const auto accumulate = state_type(grad);

  // `first` is the step that x0 enters. lambda starts at the other end, `last`, with the gradient itself, and its scan
  // writes straight into the remaining steps.
  const int64_t n = grad.size(0) - 1, first = reverse ? n : 0, last = n - first;
  const int64_t early = reverse ? 1 : 0, late = 1 - early;  // where the n steps without `last`, without `first` begin
  const at::Tensor matrices = every_step(A, layout, grad);
  lambda.select(0, last).copy_(grad.select(0, last));
  if (n > 0) {
    scan({matrices.narrow(0, late, n), grad.narrow(0, early, n), grad.select(0, last), diagonal, !reverse, !transpose},
         lambda.narrow(0, early, n));
  }

  if (want_A) {
    grad_A = empty_steps(layout == Layout::constant ? grad.sizes() : A.sizes(), A.options(), batch_first);
    at::Tensor all = layout == Layout::shared && A.dim() == 3 ? grad_A.unsqueeze(1) : grad_A;
    auto outer = [&](at::Tensor into, const at::Tensor& rows, const at::Tensor& columns) {
      if (diagonal) {
        at::mul_out(into, rows, columns);
      } else if (layout == Layout::dense) {
        at::mul_out(into, rows.unsqueeze(-1), columns.unsqueeze(-2));
      } else {
        into.squeeze(1).copy_(at::bmm(rows.transpose(1, 2).to(accumulate), columns.to(accumulate)));
      }
    };
    auto product = [&](int64_t begin, int64_t length, const at::Tensor& previous) {
      const at::Tensor l = lambda.narrow(0, begin, length);
      const bool flip = transpose && !diagonal;
      outer(all.narrow(0, begin, length), flip ? previous : l, flip ? l : previous);
    };
    if (n > 0) product(late, n, x.narrow(0, early, n));
    if (start.defined()) {
      product(first, 1, every_row(start, grad).unsqueeze(0));
    } else {
      all.select(0, first).zero_();
    }
    if (layout == Layout::constant) grad_A = summed_to(at::sum(grad_A, 0, true, accumulate), A);
  }
  if (want_x0) {
    const at::Tensor l = lambda.select(0, first), m = matrices.select(0, first);
    if (diagonal) {
      const auto type = start.dim() == 1 ? accumulate : l.scalar_type();
      grad_x0 = at::mul(m.to(type), l.to(type));
    } else {
      const at::Tensor step = (transpose ? m : m.transpose(1, 2)).to(accumulate);
      grad_x0 = at::bmm(step.expand({l.size(0), l.size(1), l.size(1)}), l.to(accumulate).unsqueeze(-1)).squeeze(-1);
    }
    grad_x0 = summed_to(grad_x0, start);
  }
  return {grad_A, lambda, grad_x0};
}

}  // namespace

Gradients linear_scan_gradients(ScanInto scan, GradientsInto gradients, const at::Tensor& grad, const at::Tensor& A,
                                const std::optional<at::Tensor>& x, const std::optional<at::Tensor>& x0, bool reverse,
                                bool transpose, std::array<bool, 3> output_mask, bool batch_first) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const at::Tensor start = x0.value_or(at::Tensor());
  const Layout layout = check(A, grad, start, batch_first);
  const bool want_A = output_mask[0], want_x0 = output_mask[2] && start.defined();
  TORCH_CHECK_VALUE(!want_A || x.has_value(), "linear_scan_backward: x is needed for the gradient of A");
  if (x.has_value()) {
    check_like("linear_scan_backward", "x", *x, "A", A);
    check_shape("linear_scan_backward", "x", *x, grad.sizes(), batch_first ? "(B, T, H)" : "(T, B, H)");
  }
  if (grad.numel() == 0) {
    return {want_A ? at::zeros_like(A, at::MemoryFormat::Contiguous) : at::Tensor(),
            output_mask[1] ? at::empty(grad.sizes(), grad.options()) : at::Tensor(),
            want_x0 ? at::zeros_like(start, at::MemoryFormat::Contiguous) : at::Tensor()};
  }
  const at::Tensor g = turned(grad, batch_first), a = turned(A, batch_first),
                   states = turned(x.value_or(at::Tensor()), batch_first);
  auto [grad_A, grad_b, grad_x0] =
      is_diagonal(layout) && gradients != nullptr
          ? diagonal_gradients(gradients, g, a, states, start, layout, reverse, {want_A, output_mask[1], want_x0},
                               batch_first)
          : gradients_by_products(scan, g, a, states, start, layout, reverse, transpose, want_A, want_x0, batch_first);
  if (!output_mask[1]) grad_b = at::Tensor();
  return {turned(grad_A, batch_first), turned(grad_b, batch_first), grad_x0};
}

}  // namespace weft::scan
