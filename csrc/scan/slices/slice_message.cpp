#include "scan/slices/slice_message.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

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

States slice_states(const SliceKernels& kernels, const at::Tensor& messages, const at::Tensor& value, int64_t order,
                    bool reverse, int64_t matrices) {
  const char* const op = "slice_states";
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
  const int64_t numbers = slice_message_numbers(matrices > 0 ? matrices * H * H : B * H, B * H);
  TORCH_CHECK_VALUE(messages.dim() == 2 && messages.size(1) == numbers, op, ": messages must be (ranks, ", numbers,
                    "), got ", messages.sizes());
  const int64_t ranks = messages.size(0);
  TORCH_CHECK_VALUE(0 <= order && order < ranks, op, ": order must be at least 0 and below ", ranks, ", got ", order);
  const at::Tensor entered = at::empty(value.sizes(), value.options()), end = at::empty(value.sizes(), value.options());
  const auto doubles = value.options().dtype(at::kDouble);
  const at::Tensor products =
      matrices > 0 ? at::empty({ranks, matrices, H, H}, doubles) : at::empty({ranks, B, H}, doubles);
  const at::Tensor came = at::zeros({1}, value.options().dtype(at::kInt));
  const at::Tensor rows = messages.contiguous();
  if (value.numel() > 0) {
    kernels.states({rows.const_data_ptr(), ranks, B, H, matrices, order, reverse, wide, entered.data_ptr(),
                    end.data_ptr(), products.data_ptr<double>(), came.data_ptr<int32_t>()});
  }
  return {entered, end, products, came};
}

at::Tensor slice_left(const SliceKernels& kernels, const at::Tensor& messages, const at::Tensor& products,
                      int64_t order, bool reverse) {
  const char* const op = "slice_left";
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
  if (left.numel() > 0) {
    kernels.gradients({rows.const_data_ptr(), of_ranks.const_data_ptr<double>(), ranks, B, H,
                       dense ? products.size(1) : 0, order, reverse, shares, messages.scalar_type() == at::kDouble,
                       left.data_ptr()});
  }
  return left;
}

void slice_mend(const SliceKernels& kernels, const at::Tensor& x, const at::Tensor& A, const at::Tensor& state,
                const std::optional<at::Tensor>& came, bool reverse) {
  const char* const op = "slice_mend_";
  check_steps(op, "x", x);
  check_like(op, "A", A, "x", x);
  check_shape(op, "A", A, x.sizes(), "(T, B, H)");
  check_row(op, "state", state, "x", x);
  check_mended(op, "x", x);
  if (x.numel() == 0) return;
  const at::Tensor rows = in_rows(A), start = state.contiguous();
  const Steps of_A = steps_of(rows, reverse), of_x = steps_of(x, reverse);
  SliceMend mend{};
  mend.A = of_A.data, mend.A_t = of_A.t, mend.A_b = of_A.b;
  mend.state = start.const_data_ptr();
  mend.came = came ? came->const_data_ptr<int32_t>() : nullptr;
  mend.x = const_cast<void*>(of_x.data), mend.x_t = of_x.t, mend.x_b = of_x.b;
  mend.T = x.size(0), mend.B = x.size(1), mend.H = x.size(2), mend.dtype = dtype_of(x);
  kernels.mend(mend);
}

void slice_mend_gradients(const SliceKernels& kernels, const at::Tensor& grad_b,
                          const std::optional<at::Tensor>& grad_A, const at::Tensor& A,
                          const std::optional<at::Tensor>& x, const std::optional<at::Tensor>& first,
                          const at::Tensor& state, bool reverse) {
  const char* const op = "slice_mend_gradients_";
  check_steps(op, "grad_b", grad_b);
  check_like(op, "A", A, "grad_b", grad_b);
  check_shape(op, "A", A, grad_b.sizes(), "(T, B, H)");
  check_row(op, "state", state, "grad_b", grad_b);
  check_mended(op, "grad_b", grad_b);
  TORCH_CHECK_VALUE(!grad_A || x, op, ": x must be given with grad_A");
  if (grad_b.numel() == 0) return;
  const bool backwards = !reverse;
  const at::Tensor rows = in_rows(A), start = state.contiguous();
  const Steps of_A = steps_of(rows, backwards), of_b = steps_of(grad_b, backwards);
  SliceMend mend{};
  mend.A = of_A.data, mend.A_t = of_A.t, mend.A_b = of_A.b;
  mend.state = start.const_data_ptr();
  mend.x = const_cast<void*>(of_b.data), mend.x_t = of_b.t, mend.x_b = of_b.b;
  mend.T = grad_b.size(0), mend.B = grad_b.size(1), mend.H = grad_b.size(2);
  mend.gradients = true, mend.dtype = dtype_of(grad_b);
  at::Tensor states, before_all;
  if (grad_A) {
    check_like(op, "grad_A", *grad_A, "grad_b", grad_b);
    check_shape(op, "grad_A", *grad_A, grad_b.sizes(), "(T, B, H)");
    check_mended(op, "grad_A", *grad_A);
    check_like(op, "x", *x, "grad_b", grad_b);
    check_shape(op, "x", *x, grad_b.sizes(), "(T, B, H)");
    states = in_rows(*x);
    const Steps of_x = steps_of(states, backwards), of_grad = steps_of(*grad_A, backwards);
    // One step further on in the order of processing is one step back in the scan.
    mend.before = static_cast<const char*>(of_x.data) + of_x.t * int64_t(states.element_size());
    mend.before_t = of_x.t, mend.before_b = of_x.b;
    mend.grad_A = const_cast<void*>(of_grad.data), mend.grad_A_t = of_grad.t, mend.grad_A_b = of_grad.b;
    if (first) {
      check_row(op, "first", *first, "grad_b", grad_b);
      before_all = first->contiguous();
      mend.first = before_all.const_data_ptr();
    }
  }
  kernels.mend(mend);
}

}  // namespace weft::scan
