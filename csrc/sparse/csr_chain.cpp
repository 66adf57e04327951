// Checks and allocation of csr_chain, for both devices; the CPU's kernel is csr_mm's, one product after the other.
#include "sparse/csr_chain.h"

#include <ATen/ops/empty.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <torch/library.h>

#include "common/tensor.h"
#include "sparse/csr_mm.h"
#include "sparse/tensors.h"

namespace weft::sparse {

std::vector<at::Tensor> csr_chain_forward(RunChain run, const at::Tensor& grad, at::TensorList crows,
                                          at::TensorList cols, at::TensorList values) {
  constexpr const char* kOp = "csr_chain";
  check_floating(kOp, "grad", grad);
  WEFT_CHECK_VALUE(grad.dim() == 2, kOp, ": grad must be (B, n), got ", grad.sizes());
  WEFT_CHECK_VALUE(crows.size() == values.size() && cols.size() == values.size(), kOp,
                   ": crows, cols and values must have one tensor per product");
  check_indices(kOp, "crows", crows, grad);
  check_indices(kOp, "cols", cols, grad);
  const int64_t batch = grad.size(0);
  std::vector<at::Tensor> out, kept = {grad.contiguous()};  // what the links point into
  std::vector<CsrLink> links;
  at::Tensor x = kept[0];
  for (size_t k = 0; k < values.size(); ++k) {
    const std::string name = "values[" + std::to_string(k) + "]";
    check_like(kOp, name.c_str(), values[k], "grad", grad);
    WEFT_CHECK_TYPE(is_wide(crows[k]) == is_wide(cols[k]) && is_wide(crows[k]) == is_wide(crows[0]), kOp,
                    ": all indices must have one dtype");
    const bool diagonal = crows[k].numel() == 0;
    const int64_t nnz = diagonal ? x.size(1) : cols[k].size(0);
    WEFT_CHECK_VALUE((values[k].dim() == 1 || (values[k].dim() == 2 && values[k].size(0) == batch)) &&
                         values[k].size(-1) == nnz && (diagonal ? cols[k].numel() == 0 : true),
                     kOp, ": ", name, " must be (", nnz, ",) or (", batch, ", ", nnz, "), got ", values[k].sizes());
    CsrLink link{};
    link.rows = diagonal ? nnz : crows[k].size(0) - 1, link.columns = x.size(1), link.nnz = nnz;
    kept.push_back(values[k].contiguous());
    link.values = kept.back().numel() > 0 ? kept.back().const_data_ptr() : nullptr;
    link.values_batch = values[k].dim() == 2 ? nnz : 0;
    if (!diagonal) {
      link.crow = crows[k].const_data_ptr();
      link.col = nnz > 0 ? cols[k].const_data_ptr() : crows[k].const_data_ptr();  // not null: no diagonal
    }
    link.x = x.numel() > 0 ? x.const_data_ptr() : nullptr;
    out.push_back(at::empty({batch, link.rows}, grad.options()));
    link.out = out.back().numel() > 0 ? out.back().mutable_data_ptr() : nullptr;
    if (link.out) links.push_back(link);
    x = out.back();
  }
  if (!links.empty()) run(links, dtype_of(grad), is_wide(crows[0]), batch);
  return out;
}

namespace {

template <typename T>
void multiply_diagonal(const CsrLink& link, int64_t batch) {
  for (int64_t b = 0; b < batch; ++b) {
    const T* values = static_cast<const T*>(link.values) + b * link.values_batch;
    const T* x = static_cast<const T*>(link.x) + b * link.rows;
    T* out = static_cast<T*>(link.out) + b * link.rows;
    for (int64_t i = 0; i < link.rows; ++i) out[i] = T(values[i] * x[i]);
  }
}

void chain_cpu(const std::vector<CsrLink>& links, DType dtype, bool wide, int64_t batch) {
  for (const CsrLink& link : links) {
    if (!link.crow) {
      with_element<c10::Half, c10::BFloat16>(
          dtype, [&](auto* t) { multiply_diagonal<std::remove_pointer_t<decltype(t)>>(link, batch); });
      continue;
    }
    CsrMm args{};
    args.dtype = dtype, args.wide = wide, args.batch = batch, args.k = 1;
    args.rows = link.rows, args.columns = link.columns, args.nnz = link.nnz;
    args.crow = link.crow, args.col = link.col;
    args.values = link.values ? link.values : link.crow;  // without elements nothing is read; null would mean ones
    args.values_batch = link.values_batch, args.x = link.x, args.x_batch = link.columns, args.out = link.out;
    csr_mm_cpu(args);
  }
}

std::vector<at::Tensor> forward_cpu(const at::Tensor& grad, at::TensorList crows, at::TensorList cols,
                                    at::TensorList values) {
  return csr_chain_forward(chain_cpu, grad, crows, cols, values);
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CPU, m) {
  m.impl("csr_chain", forward_cpu);
}

}  // namespace weft::sparse
