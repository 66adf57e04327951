// Checks, allocation and the composed form of linear_scan_readout, for both devices.
#include "scan/readout/linear_scan_readout.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <vector>

#include "common/check.h"
#include "common/integers.h"
#include "scan/linear/linear_scan.h"

namespace weft::scan::read_out {
namespace {

constexpr const char* kOp = "linear_scan";  // of which c makes a read-out

bool is_constant(const at::Tensor& t, bool batch_first) {  // in time
  return t.dim() == 2 || t.sym_size(batch_first) == 1;
}

// Whether a field is one number for each h and n, with steps and rows that may be shared.
bool fits(const at::Tensor& t, int64_t T, int64_t B, int64_t H, int64_t N, bool batch_first) {
  if (t.dim() == 2) return t.size(0) == H && t.size(1) == N;
  if (t.dim() != 4 || t.size(2) != H || t.size(3) != N) return false;
  const int64_t steps = t.size(batch_first), rows = t.size(!batch_first);
  return (steps == T || steps == 1) && (rows == B || rows == 1);
}

void check(const at::Tensor& A, const at::Tensor& b, const at::Tensor& c, const at::Tensor& x0, bool batch_first) {
  const auto type = A.scalar_type();
  TORCH_CHECK_TYPE(type == at::kHalf || type == at::kBFloat16 || type == at::kFloat || type == at::kDouble ||
                       type == at::kComplexFloat || type == at::kComplexDouble,
                   kOp, ": A must be float16, bfloat16, float32, float64, complex64 or complex128, got ", type);
  check_like(kOp, "b", b, "A", A);
  check_like(kOp, "c", c, "A", A);
  if (x0.defined()) check_like(kOp, "x0", x0, "A", A);
  const char *const steps = batch_first ? "(B, T, H, N)" : "(T, B, H, N)", *const one = batch_first ? "(B, T, H, 1)"
                                                                                                    : "(T, B, H, 1)";
  TORCH_CHECK_VALUE(b.dim() == 4, kOp, ": b must be ", steps, " or ", one, ", got ", b.sizes());
  TORCH_CHECK_VALUE(A.dim() == 2 || A.dim() == 4, kOp, ": A must be (H, N) or ", steps, ", got ", A.sizes());
  const int64_t T = b.size(batch_first), B = b.size(!batch_first), H = b.size(2), N = A.size(-1);
  TORCH_CHECK_VALUE(b.size(3) == N || b.size(3) == 1, kOp, ": b must be ", steps, " or ", one, " with N = ", N,
                    ", as A has it, got ", b.sizes());
  for (const auto& [name, t] : {std::pair<const char*, const at::Tensor&>("A", A), {"c", c}}) {
    TORCH_CHECK_VALUE(fits(t, T, B, H, N, batch_first), kOp, ": ", name, " must be (H, N) = [", H, ", ", N, "] or ",
                      steps, ", of which the first two may be 1, to go with b ", b.sizes(), ", got ", t.sizes());
  }
  TORCH_CHECK_VALUE(!x0.defined() || x0.sizes() == at::IntArrayRef({B, H, N}) || x0.sizes() == at::IntArrayRef({H, N}),
                    kOp, ": x0 must be (B, H, N) = [", B, ", ", H, ", ", N, "], or (H, N) shared by the batch, got ",
                    x0.sizes());
}

// Keeps what has to be copied alive while kernels read it.
struct Fields {
  std::vector<at::Tensor> held;
  ReadOut args{};
  bool reverse, batch_first;
  int64_t T, B;

  // The tensor as a field of (T, B, H, N); with `steps` it has time, which runs backwards in a reversed scan.
  Field field(at::Tensor t, bool n) {
    const bool aligned = !t.is_complex() || reinterpret_cast<uintptr_t>(t.data_ptr()) % t.element_size() == 0;
    if ((n && t.size(-1) > 1 && t.stride(-1) != 1) || !aligned) t = t.clone(at::MemoryFormat::Contiguous);
    held.push_back(t);
    const bool steps = t.dim() == (n ? 4 : 3);
    const int64_t h = t.dim() - (n ? 2 : 1), time = batch_first, batch = !batch_first;
    auto stride = [&](int64_t dim) { return t.size(dim) == 1 ? 0 : t.stride(dim); };
    Field f{t.data_ptr(), steps ? stride(time) : 0, steps ? stride(batch) : 0, t.size(h) == 1 ? 0 : t.stride(h)};
    turn(f.at, f.t, t.element_size());
    return f;
  }
  Field start(at::Tensor t) {
    if (!t.defined()) return {};
    Field f = field(t.dim() == 2 ? t : t.unsqueeze(batch_first ? 1 : 0), true);
    f.t = 0;
    return f;
  }
  Result result(const at::Tensor& t) const {  // contiguous (T, B, ...) or (B, T, ...)
    if (!t.defined()) return {};
    Result r{t.data_ptr(), t.stride(batch_first), t.stride(!batch_first)};
    turn(r.at, r.t, t.element_size());
    return r;
  }
  template <typename P>
  void turn(P*& at, int64_t& t, int64_t size) const {
    if (!reverse) return;
    using Byte = std::conditional_t<std::is_const_v<P>, const char, char>;
    at = static_cast<Byte*>(at) + (T - 1) * t * size;
    t = -t;
  }
};

Fields describe(const at::Tensor& A, const at::Tensor& b, const at::Tensor& c, const at::Tensor& x0, bool reverse,
                bool batch_first) {
  Fields d;
  d.reverse = reverse, d.batch_first = batch_first;
  ReadOut& s = d.args;
  s.T = d.T = b.size(batch_first), s.B = d.B = b.size(!batch_first), s.H = b.size(2), s.N = A.size(-1);
  s.dtype = dtype_of(b);
  s.A = d.field(A, true), s.b = d.field(b, true), s.c = d.field(c, true);
  s.full = b.size(3) == s.N;
  s.x0 = d.start(x0);
  return d;
}

// The dims of a problem that kernels run; one without elements is made here.
bool is_empty(const at::Tensor& A, const at::Tensor& b) {
  return b.numel() == 0 || A.size(-1) == 0;
}

at::Tensor summed_to(const at::Tensor& gradient, const at::Tensor& argument) {
  return gradient.sum_to_size_symint(argument.sym_sizes()).to(argument.scalar_type());
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> readout_forward(ReadOutInto run, const at::Tensor& A, const at::Tensor& b,
                                                   const at::Tensor& c, const std::optional<at::Tensor>& x0,
                                                   bool reverse, bool batch_first, bool save) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const at::Tensor start = x0.value_or(at::Tensor());
  check(A, b, c, start, batch_first);
  const auto state = b.options().dtype(state_type(b));
  const at::IntArrayRef sizes = b.sizes().slice(0, 3);
  const int64_t T = b.size(batch_first), B = b.size(!batch_first), H = b.size(2), N = A.size(-1);
  const int64_t segments = save ? ceil_div(T, int64_t(segment_steps(dtype_of(b)))) : 0;
  at::Tensor starts = save ? at::empty({segments, B, H, N}, state) : at::empty({0}, state);
  if (is_empty(A, b)) return {at::zeros(sizes, b.options()), starts};
  if (run == nullptr) {
    // The gradients write the states again: nothing is kept.
    return {composed_readout(A, b, c, x0, reverse, batch_first).contiguous(), starts.zero_()};
  }
  at::Tensor y = at::empty(sizes, b.options());
  Fields d = describe(A, b, c, start, reverse, batch_first);
  d.args.y = d.result(y);
  if (save) d.args.starts = starts.data_ptr();
  run(d.args, b);
  return {y, starts};
}

ReadOutGradientsOf readout_gradients(ReadOutGradientsInto run, const at::Tensor& grad, const at::Tensor& A,
                                     const at::Tensor& b, const at::Tensor& c, const std::optional<at::Tensor>& x0,
                                     const at::Tensor& starts, bool reverse, bool batch_first,
                                     std::array<bool, 4> wanted) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const at::Tensor start = x0.value_or(at::Tensor());
  check(A, b, c, start, batch_first);
  check_like("linear_scan_readout_backward", "grad", grad, "A", A);
  check_shape("linear_scan_readout_backward", "grad", grad, b.sizes().slice(0, 3),
              batch_first ? "(B, T, H)" : "(T, B, H)");
  wanted[3] = wanted[3] && start.defined();
  if (is_empty(A, b)) {
    const auto zeros = [](bool want, const at::Tensor& t) {
      return want ? at::zeros_like(t, at::MemoryFormat::Contiguous) : at::Tensor();
    };
    return {zeros(wanted[0], A), zeros(wanted[1], b), zeros(wanted[2], c), zeros(wanted[3], start)};
  }
  if (run == nullptr) return composed_readout_gradients(grad, A, b, c, x0, reverse, batch_first, wanted);
  const auto state = b.options().dtype(state_type(b));
  Fields d = describe(A, b, c, start, reverse, batch_first);
  const int64_t T = d.T, B = d.B, H = b.size(2), N = A.size(-1);
  const int64_t segments = ceil_div(T, int64_t(segment_steps(dtype_of(b))));
  check_shape("linear_scan_readout_backward", "starts", starts, {segments, B, H, N}, "(segments, B, H, N)");
  const at::Tensor kept = starts.contiguous();
  ReadOutGradients g{};
  g.grad = d.field(grad, false);
  g.sum_A = is_constant(A, batch_first), g.sum_c = is_constant(c, batch_first);
  const std::vector<int64_t> every = batch_first ? std::vector{B, T, H, N} : std::vector{T, B, H, N};
  auto of_field = [&](bool want, bool sum) {
    return !want ? at::Tensor() : sum ? at::empty({B, H, N}, state) : at::empty(every, b.options());
  };
  at::Tensor grad_A = of_field(wanted[0], g.sum_A), grad_c = of_field(wanted[2], g.sum_c), grad_b, grad_x0;
  if (wanted[1]) grad_b = at::empty(b.sizes(), b.options());
  if (wanted[3]) grad_x0 = at::empty({B, H, N}, state);
  auto into = [&](const at::Tensor& t, bool sum) {
    return sum && t.defined() ? Result{t.data_ptr(), 0, 0} : d.result(t);
  };
  g.A = into(grad_A, g.sum_A), g.c = into(grad_c, g.sum_c), g.b = d.result(grad_b);
  if (wanted[3]) g.x0 = grad_x0.data_ptr();
  g.scan = d.args;
  g.scan.starts = kept.data_ptr();
  run(g, b);
  auto back = [&](const at::Tensor& gradient, const at::Tensor& argument, bool sum) {
    if (!gradient.defined()) return gradient;
    const bool rows = sum && argument.dim() == 4;
    return summed_to(rows ? gradient.unsqueeze(batch_first ? 1 : 0) : gradient, argument).contiguous();
  };
  return {back(grad_A, A, g.sum_A), grad_b, back(grad_c, c, g.sum_c), wanted[3] ? summed_to(grad_x0, start) : grad_x0};
}

namespace {

// The states, written: (T, B, H, N), or with batch first.
at::Tensor states_of(const at::Tensor& A, const at::Tensor& b, const std::optional<at::Tensor>& x0, bool reverse,
                     bool batch_first, at::Tensor& flat_A, at::Tensor& flat, std::optional<at::Tensor>& flat_x0) {
  const auto T = b.sym_size(batch_first), B = b.sym_size(!batch_first), H = b.sym_size(2), N = A.sym_size(-1);
  const auto whole = b.sym_sizes().slice(0, 3);
  flat = b.expand_symint({whole[0], whole[1], H, N}).flatten(2);
  if (A.dim() == 2) {
    flat_A = A.flatten();
  } else if (is_constant(A, batch_first)) {
    flat_A = A.flatten(2);
  } else {
    flat_A = A.expand_symint({whole[0], whole[1], H, N}).flatten(2);
  }
  if (x0.has_value()) flat_x0 = x0->expand_symint({B, H, N}).flatten(1);
  return linear_scan_op(flat_A, flat, flat_x0, reverse, false, batch_first);
}

}  // namespace

at::Tensor composed_readout(const at::Tensor& A, const at::Tensor& b, const at::Tensor& c,
                            const std::optional<at::Tensor>& x0, bool reverse, bool batch_first) {
  at::Tensor flat_A, flat;
  std::optional<at::Tensor> flat_x0;
  const at::Tensor x = states_of(A, b, x0, reverse, batch_first, flat_A, flat, flat_x0);
  const at::Tensor states = x.unflatten_symint(2, {b.sym_size(2), A.sym_size(-1)});
  const auto type = state_type(b);
  return at::mul(c.to(type), states.to(type)).sum(-1).to(b.scalar_type());
}

ReadOutGradientsOf composed_readout_gradients(const at::Tensor& grad, const at::Tensor& A, const at::Tensor& b,
                                              const at::Tensor& c, const std::optional<at::Tensor>& x0, bool reverse,
                                              bool batch_first, std::array<bool, 4> wanted) {
  at::Tensor flat_A, flat;
  std::optional<at::Tensor> flat_x0;
  const at::Tensor x = states_of(A, b, x0, reverse, batch_first, flat_A, flat, flat_x0);
  const auto H = b.sym_size(2), N = A.sym_size(-1);
  const auto apart = [&](const at::Tensor& t, int64_t dim) { return t.unflatten_symint(dim, {H, N}); };
  const at::Tensor gradient = grad.unsqueeze(-1);
  // Of c (H, N) it is one of the whole batch.
  const at::Tensor grad_x = at::mul(gradient, c.conj()).flatten(2);
  const std::array<bool, 3> mask = {wanted[0], wanted[1], wanted[3] && x0.has_value()};
  auto [grad_A, grad_b, grad_x0] =
      linear_scan_backward_op(grad_x, flat_A, x, flat_x0, reverse, false, mask, batch_first);
  at::Tensor grad_c;
  if (wanted[2]) grad_c = summed_to(at::mul(gradient, apart(x, 2).conj()), c);
  if (mask[0]) {
    grad_A = grad_A.dim() == 1 ? apart(grad_A, 0) : apart(grad_A, 2);
    grad_A = summed_to(grad_A, A);
  }
  if (mask[1]) grad_b = summed_to(apart(grad_b, 2), b);
  if (mask[2]) grad_x0 = summed_to(apart(grad_x0, 1), *x0);
  return {grad_A, grad_b, grad_c, grad_x0};
}

}  // namespace weft::scan::read_out
