// csr_chain on the CPU: csr_mm's kernel, one product after the other.
#include "sparse/csr_chain.h"

#include <torch/library.h>

#include "sparse/cpu/parallel.h"
#include "sparse/csr_mm.h"

namespace weft::sparse {
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

// A core writes what a layer's Jacobian has before it multiplies: most of it is in its cache then.
std::vector<at::Tensor> layers_cpu(const at::Tensor& grad, at::TensorList crows, at::TensorList cols,
                                   at::TensorList values, at::TensorList sources, at::IntArrayRef reads) {
  return csr_chain_forward(chain_cpu, grad, crows, cols, written_values(grad, crows, cols, values, sources, reads));
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CPU, m) {
  m.impl("csr_chain", forward_cpu);
  m.impl("layer_chain", layers_cpu);
}

}  // namespace weft::sparse
