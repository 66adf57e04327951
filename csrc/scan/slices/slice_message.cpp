#include "scan/slices/slice_message.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <array>

#include "common/check.h"

namespace weft::scan {
namespace {

void check_type(const char* op, const char* name, const at::Tensor& t) {
  const auto type = t.scalar_type();
  TORCH_CHECK_TYPE(type == at::kFloat || type == at::kDouble, op, ": ", name, " must be float32 or float64, got ",
                   type);
}

void check_steps(const char* op, const char* name, const at::Tensor& t) {
  const auto type = t.scalar_type();
  TORCH_CHECK_TYPE(type == at::kFloat || type == at::kDouble || type == at::kBFloat16, op, ": ", name,
                   " must be float32, float64 or bfloat16, got ", type);
  TORCH_CHECK_VALUE(t.dim() == 3, op, ": ", name, " must be (T, B, H), got ", t.sizes());
}

DType dtype_of(const at::Tensor& steps) {
  const auto type = steps.scalar_type();
  return type == at::kDouble ? DType::f64 : type == at::kBFloat16 ? DType::bf16 : DType::f32;
}

void check_row(const char* op, const char* name, const at::Tensor& t, const char* like_name, const at::Tensor& like) {
  if (like.scalar_type() == at::kBFloat16) {
    TORCH_CHECK_TYPE(t.scalar_type() == at::kFloat, op, ": ", name, " must be float32 beside ", like_name,
                     " in bfloat16, got ", t.scalar_type());
    TORCH_CHECK(t.device() == like.device(), op, ": ", name, " must be on the device of ", like_name, ", ",
                like.device(), ", got ", t.device());
  } else {
    check_like(op, name, t, like_name, like);
  }
  check_shape(op, name, t, like.sizes().slice(1), "(B, H)");
}

// Channels one after another.
at::Tensor in_rows(const at::Tensor& t) {
  return t.stride(-1) == 1 || t.size(-1) == 1 ? t : t.contiguous();
}

void check_mended(const char* op, const char* name, const at::Tensor& t) {
  TORCH_CHECK_VALUE(t.is_contiguous(), op, ": ", name, " must be contiguous");
}

struct Steps {
  const void* data;
  int64_t t, b;
};
// Steps of t in their order, or from the last to the first.
Steps steps_of(const at::Tensor& t, bool backwards) {
  const int64_t stride = t.stride(0), last = backwards ? (t.size(0) - 1) * stride : 0;
  return {static_cast<const char*>(t.const_data_ptr()) + last * int64_t(t.element_size()), backwards ? -stride : stride,
          t.stride(1)};
}

}  // namespace

at::Tensor slice_message(const SliceKernels& kernels, const at::Tensor& A, const at::Tensor& value, bool leaves) {
  const char* const op = "slice_message";
  check_steps(op, "A", A);
  check_row(op, "value", value, "A", A);
  const bool wide = A.scalar_type() == at::kDouble;
  const int64_t B = A.size(1), H = A.size(2);
  const at::Tensor message =
      at::empty({slice_message_numbers(B * H, B * H)}, A.options().dtype(wide ? at::kLong : at::kInt));
  const at::Tensor rows = in_rows(A);
  const Steps steps = A.numel() == 0 ? Steps{} : steps_of(rows, false);
  kernels.message({steps.data, steps.t, steps.b, B * H == 0 ? 0 : A.size(0), B, H, dtype_of(A)}, value.contiguous(),
                  leaves, message);
  return message;
}

namespace {

// States between slices and what a kernel is given for them, with what keeps its memory alive.
struct DescribedStates {
  at::Tensor messages, entered, end, products, came;
  SliceStates args;
};
DescribedStates describe_states(const char* op, const at::Tensor& messages, const at::Tensor& value, int64_t order,
                                bool reverse, int64_t matrices, bool shares) {
  check_type(op, "value", value);
  TORCH_CHECK_VALUE(value.dim() == 2, op, ": value must be (B, H), got ", value.sizes());
  const bool wide = value.scalar_type() == at::kDouble;
  TORCH_CHECK_TYPE(messages.scalar_type() == (wide ? at::kLong : at::kInt), op, ": messages must be ",
                   wide ? "int64" : "int32", ", got ", messages.scalar_type());
  TORCH_CHECK(messages.device() == value.device(), op, ": messages must be on the device of value, ", value.device(),
              ", got ", messages.device());
  const int64_t B = value.size(0), H = value.size(1);
  TORCH_CHECK_VALUE(matrices == 0 || matrices == 1 || matrices == B, op, ": matrices must be 0, 1 or ", B, ", got ",
                    matrices);
  TORCH_CHECK_VALUE(!shares || matrices > 0, op, ": shares are of messages with matrices");
  const int64_t numbers = slice_message_numbers(matrices > 0 ? matrices * H * H : B * H, B * H) + shares * B * H;
  TORCH_CHECK_VALUE(messages.dim() == 2 && messages.size(1) == numbers, op, ": messages must be (ranks, ", numbers,
                    "), got ", messages.sizes());
  const int64_t ranks = messages.size(0);
  TORCH_CHECK_VALUE(0 <= order && order < ranks, op, ": order must be at least 0 and below ", ranks, ", got ", order);
  const at::Tensor entered = at::empty(value.sizes(), value.options()), end = at::empty(value.sizes(), value.options());
  const auto doubles = value.options().dtype(at::kDouble);
  const at::Tensor products =
      matrices > 0 ? at::empty({ranks, matrices, H, H}, doubles) : at::empty({ranks, B, H}, doubles);
  // Written by the kernel: zeros would be a launch more.
  const auto integers = value.options().dtype(at::kInt);
  const at::Tensor came = value.numel() > 0 ? at::empty({1}, integers) : at::zeros({1}, integers);
  const at::Tensor rows = messages.contiguous();
  return {rows,
          entered,
          end,
          products,
          came,
          {rows.const_data_ptr(), ranks, B, H, matrices, order, reverse, shares, wide, entered.data_ptr(),
           end.data_ptr(), products.data_ptr<double>(), came.data_ptr<int32_t>()}};
}

}  // namespace

States slice_states(const SliceKernels& kernels, const at::Tensor& messages, const at::Tensor& value, int64_t order,
                    bool reverse, int64_t matrices, bool shares) {
  const DescribedStates d = describe_states("slice_states", messages, value, order, reverse, matrices, shares);
  if (value.numel() > 0) kernels.states(d.args);
  return {d.entered, d.end, d.products, d.came};
}

namespace {

// Likewise.
struct DescribedLeft {
  at::Tensor messages, products, left;
  SliceGradients args;
};
DescribedLeft describe_left(const char* op, const at::Tensor& messages, const at::Tensor& products, int64_t order,
                            bool reverse) {
  check_type(op, "messages", messages);
  TORCH_CHECK_TYPE(products.scalar_type() == at::kDouble, op, ": products must be float64, got ",
                   products.scalar_type());
  TORCH_CHECK(products.device() == messages.device(), op, ": products must be on the device of messages, ",
              messages.device(), ", got ", products.device());
  const bool shares = messages.dim() == 4;
  TORCH_CHECK_VALUE(messages.dim() == 3 || (shares && messages.size(1) == 2), op,
                    ": messages must be (ranks, B, H) or (ranks, 2, B, H), got ", messages.sizes());
  const int64_t B = messages.size(-2), H = messages.size(-1);
  const bool diagonal = products.dim() == 3 && products.size(1) == B && products.size(2) == H;
  const bool dense = products.dim() == 4 && (products.size(1) == 1 || products.size(1) == B) && products.size(2) == H &&
                     products.size(3) == H;
  TORCH_CHECK_VALUE(products.size(0) == messages.size(0) && (diagonal || dense), op, ": products must be (ranks, ", B,
                    ", ", H, "), or (ranks, 1 or ", B, ", ", H, ", ", H, ") of matrices, got ", products.sizes());
  const int64_t ranks = messages.size(0);
  TORCH_CHECK_VALUE(0 <= order && order < ranks, op, ": order must be at least 0 and below ", ranks, ", got ", order);
  const at::Tensor left = at::empty({B, H}, messages.options());
  const at::Tensor rows = messages.contiguous(), of_ranks = products.contiguous();
  return {rows,
          of_ranks,
          left,
          {rows.const_data_ptr(), of_ranks.const_data_ptr<double>(), ranks, B, H, dense ? products.size(1) : 0, order,
           reverse, shares, messages.scalar_type() == at::kDouble, left.data_ptr()}};
}

}  // namespace

at::Tensor slice_left(const SliceKernels& kernels, const at::Tensor& messages, const at::Tensor& products,
                      int64_t order, bool reverse) {
  const DescribedLeft d = describe_left("slice_left", messages, products, order, reverse);
  if (d.left.numel() > 0) kernels.gradients(d.args);
  return d.left;
}

namespace {

struct DescribedMend {
  std::array<at::Tensor, 4> rows;
  SliceMend args;
};
// All but what comes in.
DescribedMend describe_mend(const char* op, const at::Tensor& x, const at::Tensor& A, bool reverse) {
  check_steps(op, "x", x);
  check_like(op, "A", A, "x", x);
  check_shape(op, "A", A, x.sizes(), "(T, B, H)");
  check_mended(op, "x", x);
  DescribedMend d{{in_rows(A)}, {}};
  if (x.numel() == 0) return d;
  const Steps of_A = steps_of(d.rows[0], reverse), of_x = steps_of(x, reverse);
  SliceMend& mend = d.args;
  mend.A = of_A.data, mend.A_t = of_A.t, mend.A_b = of_A.b;
  mend.x = const_cast<void*>(of_x.data), mend.x_t = of_x.t, mend.x_b = of_x.b;
  mend.T = x.size(0), mend.B = x.size(1), mend.H = x.size(2), mend.dtype = dtype_of(x);
  return d;
}

DescribedMend describe_mend_gradients(const char* op, const at::Tensor& grad_b, const std::optional<at::Tensor>& grad_A,
                                      const at::Tensor& A, const std::optional<at::Tensor>& x,
                                      const std::optional<at::Tensor>& first, bool reverse) {
  check_steps(op, "grad_b", grad_b);
  check_like(op, "A", A, "grad_b", grad_b);
  check_shape(op, "A", A, grad_b.sizes(), "(T, B, H)");
  check_mended(op, "grad_b", grad_b);
  TORCH_CHECK_VALUE(!grad_A || x, op, ": x must be given with grad_A");
  DescribedMend d{{in_rows(A)}, {}};
  if (grad_b.numel() == 0) return d;
  const bool backwards = !reverse;
  const Steps of_A = steps_of(d.rows[0], backwards), of_b = steps_of(grad_b, backwards);
  SliceMend& mend = d.args;
  mend.A = of_A.data, mend.A_t = of_A.t, mend.A_b = of_A.b;
  mend.x = const_cast<void*>(of_b.data), mend.x_t = of_b.t, mend.x_b = of_b.b;
  mend.T = grad_b.size(0), mend.B = grad_b.size(1), mend.H = grad_b.size(2);
  mend.gradients = true, mend.dtype = dtype_of(grad_b);
  if (grad_A) {
    check_like(op, "grad_A", *grad_A, "grad_b", grad_b);
    check_shape(op, "grad_A", *grad_A, grad_b.sizes(), "(T, B, H)");
    check_mended(op, "grad_A", *grad_A);
    check_like(op, "x", *x, "grad_b", grad_b);
    check_shape(op, "x", *x, grad_b.sizes(), "(T, B, H)");
    const at::Tensor& states = d.rows[1] = in_rows(*x);
    const Steps of_x = steps_of(states, backwards), of_grad = steps_of(*grad_A, backwards);
    // One step further on in the order of processing is one step back in the scan.
    mend.before = static_cast<const char*>(of_x.data) + of_x.t * int64_t(states.element_size());
    mend.before_t = of_x.t, mend.before_b = of_x.b;
    mend.grad_A = const_cast<void*>(of_grad.data), mend.grad_A_t = of_grad.t, mend.grad_A_b = of_grad.b;
    if (first) {
      check_row(op, "first", *first, "grad_b", grad_b);
      d.rows[2] = first->contiguous();
      mend.first = d.rows[2].const_data_ptr();
    }
  }
  return d;
}

}  // namespace

void slice_mend(const SliceKernels& kernels, const at::Tensor& x, const at::Tensor& A, const at::Tensor& state,
                const std::optional<at::Tensor>& came, bool reverse) {
  DescribedMend d = describe_mend("slice_mend_", x, A, reverse);
  check_row("slice_mend_", "state", state, "x", x);
  if (x.numel() == 0) return;
  const at::Tensor start = state.contiguous();
  d.args.state = start.const_data_ptr();
  d.args.came = came ? came->const_data_ptr<int32_t>() : nullptr;
  kernels.mend(d.args);
}

void slice_mend_gradients(const SliceKernels& kernels, const at::Tensor& grad_b,
                          const std::optional<at::Tensor>& grad_A, const at::Tensor& A,
                          const std::optional<at::Tensor>& x, const std::optional<at::Tensor>& first,
                          const at::Tensor& state, bool reverse) {
  const char* const op = "slice_mend_gradients_";
  DescribedMend d = describe_mend_gradients(op, grad_b, grad_A, A, x, first, reverse);
  check_row(op, "state", state, "grad_b", grad_b);
  if (grad_b.numel() == 0) return;
  const at::Tensor start = state.contiguous();
  d.args.state = start.const_data_ptr();
  kernels.mend(d.args);
}

Finished slice_finish(const SliceKernels& kernels, const at::Tensor& x, const at::Tensor& A, const at::Tensor& messages,
                      int64_t order, bool reverse) {
  const char* const op = "slice_finish_";
  const DescribedMend m = describe_mend(op, x, A, reverse);
  TORCH_CHECK_VALUE(x.numel() > 0, op, ": x must not be empty, got ", x.sizes());
  const DescribedStates s = describe_states(op, messages, x.select(0, 0), order, reverse, 0, false);
  order > 0 ? kernels.finish(m.args, s.args) : kernels.states(s.args);
  return {s.entered, s.end, s.products};
}

at::Tensor slice_finish_gradients(const SliceKernels& kernels, const at::Tensor& grad_b,
                                  const std::optional<at::Tensor>& grad_A, const at::Tensor& A, const at::Tensor& x,
                                  const std::optional<at::Tensor>& start, const at::Tensor& messages,
                                  const at::Tensor& products, int64_t order, bool reverse) {
  const char* const op = "slice_finish_gradients_";
  const DescribedMend m = describe_mend_gradients(op, grad_b, grad_A, A, x, start, reverse);
  TORCH_CHECK_VALUE(grad_b.numel() > 0, op, ": grad_b must not be empty, got ", grad_b.sizes());
  const bool alone = messages.dim() == 4 && messages.size(1) == 1;
  const DescribedLeft l = describe_left(op, alone ? messages.squeeze(1) : messages, products, order, reverse);
  check_row(op, "left", l.left, "grad_b", grad_b);
  kernels.finish_gradients(m.args, l.args);
  return l.left;
}

}  // namespace weft::scan
