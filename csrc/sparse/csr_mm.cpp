// Checks and allocation of csr_mm and csr_sampled_mm, for both devices; CPU registration.
#include "sparse/csr_mm.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "common/tensor.h"
#include "sparse/tensors.h"

namespace weft::sparse {

at::Tensor csr_mm_forward(RunMm run, at::TensorList pattern, const std::optional<at::Tensor>& values,
                          const at::Tensor& x) {
  constexpr const char* kOp = "csr_mm";
  check_floating(kOp, "x", x);
  check_pattern(kOp, "pattern", pattern, true, x);
  TORCH_CHECK_VALUE(x.dim() == 2 || x.dim() == 3, kOp, ": x must be (columns, k) or (B, columns, k), got ", x.sizes());
  Batch batch;
  batch.join(kOp, "x", x.dim() == 3, x.size(0));
  at::Tensor v, dense = x.contiguous();
  const int64_t nnz = pattern[1].size(0);
  if (values) {
    check_like(kOp, "values", *values, "x", x);
    TORCH_CHECK_VALUE(values->dim() == 1 || values->dim() == 2, kOp, ": values must be (nnz,) or (B, nnz), got ",
                      values->sizes());
    TORCH_CHECK_VALUE(values->size(-1) == nnz, kOp, ": values must have one number per element of the pattern, ", nnz,
                      ", got ", values->sizes());
    batch.join(kOp, "values", values->dim() == 2, values->size(0));
    v = values->contiguous();
  }
  CsrMm args{};
  args.dtype = dtype_of(x), args.wide = is_wide(pattern[0]);
  args.batch = batch.size < 0 ? 1 : batch.size, args.rows = pattern[0].size(0) - 1;
  args.columns = x.size(-2), args.k = x.size(-1), args.nnz = nnz;
  std::vector<int64_t> sizes = {args.rows, args.k};
  if (batch.size >= 0) sizes.insert(sizes.begin(), args.batch);
  at::Tensor out = at::empty(sizes, x.options());
  if (out.numel() == 0) return out;
  args.crow = pattern[0].const_data_ptr(), args.col = pattern[1].const_data_ptr();
  if (pattern.size() == 3) args.index = pattern[2].const_data_ptr();
  if (v.defined()) args.values = v.const_data_ptr(), args.values_batch = v.dim() == 2 ? nnz : 0;
  args.x = dense.const_data_ptr(), args.x_batch = x.dim() == 3 ? args.columns * args.k : 0;
  args.out = out.mutable_data_ptr();
  run(args);
  return out;
}

at::Tensor csr_sampled_mm_forward(RunSampledMm run, at::TensorList pattern, const at::Tensor& left,
                                  const at::Tensor& right, bool shared) {
  constexpr const char* kOp = "csr_sampled_mm";
  check_floating(kOp, "left", left);
  check_like(kOp, "right", right, "left", left);
  check_pattern(kOp, "pattern", pattern, false, left);
  const int64_t rows = pattern[0].size(0) - 1, nnz = pattern[1].size(0);
  TORCH_CHECK_VALUE((left.dim() == 2 || left.dim() == 3) && left.size(-2) == rows, kOp,
                    ": left must be (rows, k) or (B, rows, k) with ", rows, " rows, got ", left.sizes());
  TORCH_CHECK_VALUE((right.dim() == 2 || right.dim() == 3) && right.size(-1) == left.size(-1), kOp,
                    ": right must be (columns, k) or (B, columns, k) with the k of left, ", left.size(-1), ", got ",
                    right.sizes());
  Batch batch;
  batch.join(kOp, "left", left.dim() == 3, left.size(0));
  batch.join(kOp, "right", right.dim() == 3, right.size(0));
  TORCH_CHECK_VALUE(shared || batch.size >= 0, kOp, ": without `shared` an operand must have a batch, got left ",
                    left.sizes(), " and right ", right.sizes());
  const at::Tensor l = left.contiguous(), r = right.contiguous();
  CsrSampledMm args{};
  args.dtype = dtype_of(l), args.wide = is_wide(pattern[0]), args.shared = shared;
  args.batch = batch.size < 0 ? 1 : batch.size, args.rows = rows, args.columns = r.size(-2);
  args.k = l.size(-1), args.nnz = nnz;
  at::Tensor out = shared ? at::empty({nnz}, l.options()) : at::empty({args.batch, nnz}, l.options());
  if (out.numel() == 0) return out;
  args.crow = pattern[0].const_data_ptr(), args.col = pattern[1].const_data_ptr();
  args.left = l.const_data_ptr(), args.right = r.const_data_ptr();
  args.left_batch = l.dim() == 3 ? rows * args.k : 0;
  args.right_batch = r.dim() == 3 ? args.columns * args.k : 0;
  args.out = out.mutable_data_ptr();
  run(args);
  return out;
}

namespace {

at::Tensor mm_cpu(at::TensorList pattern, at::TensorList /*transposed*/, const std::optional<at::Tensor>& values,
                  const at::Tensor& x) {
  return csr_mm_forward(csr_mm_cpu, pattern, values, x);
}

at::Tensor sampled_mm_cpu(at::TensorList pattern, at::TensorList /*transposed*/, const at::Tensor& left,
                          const at::Tensor& right, bool shared) {
  return csr_sampled_mm_forward(csr_sampled_mm_cpu, pattern, left, right, shared);
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CPU, m) {
  m.impl("csr_mm", mm_cpu);
  m.impl("csr_sampled_mm", sampled_mm_cpu);
}

}  // namespace weft::sparse
