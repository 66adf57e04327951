// Checks and allocation of csr_chain and layer_chain, for both devices.
#include "sparse/csr_chain.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/index.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/threshold_backward.h>

#include "common/tensor.h"
#include "sparse/tensors.h"

namespace weft::sparse {

std::vector<at::Tensor> csr_chain_forward(RunChain run, const at::Tensor& grad, at::TensorList crows,
                                          at::TensorList cols, at::TensorList values, at::TensorList sources,
                                          at::IntArrayRef reads) {
  const bool layers = !sources.empty();
  const char* const kOp = layers ? "layer_chain" : "csr_chain";
  check_floating(kOp, "grad", grad);
  TORCH_CHECK_VALUE(grad.dim() == 2, kOp, ": grad must be (B, n), got ", grad.sizes());
  TORCH_CHECK_VALUE(crows.size() == values.size() && cols.size() == values.size(), kOp,
                    ": crows, cols and values must have one tensor per product");
  TORCH_CHECK_VALUE(sources.size() == reads.size() && (!layers || sources.size() == values.size()), kOp,
                    ": sources and reads must have one of each per product");
  check_indices(kOp, "sources", sources, grad);
  check_indices(kOp, "crows", crows, grad);
  check_indices(kOp, "cols", cols, grad);
  const int64_t batch = grad.size(0);
  std::vector<at::Tensor> out, kept = {grad.contiguous()};  // what the links point into
  std::vector<CsrLink> links;
  at::Tensor x = kept[0];
  for (size_t k = 0; k < values.size(); ++k) {
    const std::string name = "values[" + std::to_string(k) + "]";
    const int64_t read = layers ? reads[k] : 0;
    if (read <= 0) check_like(kOp, name.c_str(), values[k], "grad", grad);
    TORCH_CHECK_TYPE(is_wide(crows[k]) == is_wide(cols[k]) && is_wide(crows[k]) == is_wide(crows[0]), kOp,
                     ": all indices must have one dtype");
    const bool diagonal = crows[k].numel() == 0;
    const int64_t nnz = diagonal ? x.size(1) : cols[k].size(0);
    CsrLink link{};
    link.reads = read;
    if (layers && sources[k].numel() > 0) {
      TORCH_CHECK_VALUE(!diagonal && read == 0 && sources[k].size(0) == nnz && is_wide(sources[k]) == is_wide(crows[k]),
                        kOp, ": sources[", k, "] must have the size and dtype of its columns, ", nnz, ", got ",
                        sources[k].sizes());
      link.source = sources[k].const_data_ptr();
    } else if (read > 0) {
      TORCH_CHECK_VALUE(!diagonal && values[k].scalar_type() == at::kLong && values[k].device() == grad.device() &&
                            values[k].dim() == 2 && values[k].size(0) == batch && values[k].size(1) == x.size(1),
                        kOp, ": ", name, " must be int64 (", batch, ", ", x.size(1), "), got ", values[k].scalar_type(),
                        " ", values[k].sizes());
      link.values_batch = x.size(1);
    } else if (!layers || diagonal || nnz > 0) {
      TORCH_CHECK_VALUE((values[k].dim() == 1 || (values[k].dim() == 2 && values[k].size(0) == batch)) &&
                            values[k].size(-1) == nnz && (diagonal ? cols[k].numel() == 0 : read == 0),
                        kOp, ": ", name, " must be (", nnz, ",) or (", batch, ", ", nnz, "), got ", values[k].sizes());
      link.values_batch = values[k].dim() == 2 ? nnz : 0;
    }
    link.rows = diagonal ? nnz : crows[k].size(0) - 1, link.columns = x.size(1), link.nnz = nnz;
    kept.push_back(values[k].contiguous());
    link.values = kept.back().numel() > 0 ? kept.back().const_data_ptr() : nullptr;
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

// Elements of a weight, by a function whose gradient adds up in one order: that of indexing does where it sorts, on
// CUDA, that of index_select on a CPU.
at::Tensor read_at(const at::Tensor& weight, const at::Tensor& places) {
  const at::Tensor flat = weight.reshape({-1});
  if (!weight.is_cuda()) return flat.index_select(0, places);
  return at::index(flat, c10::List<std::optional<at::Tensor>>{std::optional(places)});
}

std::vector<at::Tensor> written_values(const at::Tensor& grad, at::TensorList crows, at::TensorList cols,
                                       at::TensorList values, at::TensorList sources, at::IntArrayRef reads) {
  TORCH_CHECK_VALUE(sources.size() == values.size() && reads.size() == values.size() && cols.size() == values.size() &&
                        crows.size() == values.size(),
                    "layer_chain: crows, cols, values, sources and reads must have one of each per product");
  std::vector<at::Tensor> written;
  for (size_t k = 0; k < values.size(); ++k) {
    if (reads[k] < 0) {
      written.push_back(at::threshold_backward(at::ones_like(values[k]), values[k], 0));
    } else if (reads[k] > 0) {
      const at::Tensor row =
          at::repeat_interleave_symint(crows[k].diff().to(at::kLong), std::optional(cols[k].sym_size(0)));
      const at::Tensor picked = values[k].index_select(1, cols[k]);
      written.push_back(at::eq(picked, row.remainder(reads[k])).to(grad.scalar_type()));
    } else if (sources[k].sym_size(0) != 0) {
      written.push_back(read_at(values[k], sources[k].to(at::kLong)));
    } else {
      const bool nothing = crows[k].sym_size(0) != 0 && cols[k].sym_size(0) == 0;
      written.push_back(nothing ? values[k].reshape({-1}).narrow(0, 0, 0) : values[k]);
    }
  }
  return written;
}

}  // namespace weft::sparse
