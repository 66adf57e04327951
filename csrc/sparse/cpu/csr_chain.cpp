// csr_chain and layer_chain on the CPU: csr_mm's kernel, one product after the other.
#include "sparse/csr_chain.h"

#include <torch/library.h>

#include <type_traits>
#include <vector>

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
    if (link.reads == 0) {
      for (int64_t i = 0; i < link.rows; ++i) out[i] = T(values[i] * x[i]);
    } else {  // NaN and inf are multiplied, as by a number that is written
      for (int64_t i = 0; i < link.rows; ++i) out[i] = T((values[i] <= T(0) ? T(0) : T(1)) * x[i]);
    }
  }
}

// The values of a matrix that is read where its layer has them: (nnz,), or (batch, nnz) of a max-pooling.
template <typename I, typename T>
std::vector<T> written(const CsrLink& link, int64_t batch) {
  const I *crow = static_cast<const I*>(link.crow), *col = static_cast<const I*>(link.col);
  std::vector<T> found(link.nnz * (link.source ? 1 : batch));
  if (link.source) {
    const T* values = static_cast<const T*>(link.values);
    const I* source = static_cast<const I*>(link.source);
    for (int64_t e = 0; e < link.nnz; ++e) found[e] = values[source[e]];
    return found;
  }
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t* picked = static_cast<const int64_t*>(link.values) + b * link.values_batch;
    for (int64_t row = 0; row < link.rows; ++row) {
      for (I e = crow[row]; e < crow[row + 1]; ++e) {
        found[b * link.nnz + e] = T(picked[col[e]] == row % link.reads ? 1 : 0);
      }
    }
  }
  return found;
}

void multiply_matrix(const CsrLink& link, const void* values, int64_t values_batch, DType dtype, bool wide,
                     int64_t batch) {
  CsrMm args{};
  args.dtype = dtype, args.wide = wide, args.batch = batch, args.k = 1;
  args.rows = link.rows, args.columns = link.columns, args.nnz = link.nnz;
  args.crow = link.crow, args.col = link.col;
  args.values = values ? values : link.crow;  // without elements nothing is read; null would mean ones
  args.values_batch = values_batch, args.x = link.x, args.x_batch = link.columns, args.out = link.out;
  csr_mm_cpu(args);
}

void chain_cpu(const std::vector<CsrLink>& links, DType dtype, bool wide, int64_t batch) {
  for (const CsrLink& link : links) {
    if (!link.crow) {
      with_element<c10::Half, c10::BFloat16>(
          dtype, [&](auto* t) { multiply_diagonal<std::remove_pointer_t<decltype(t)>>(link, batch); });
      continue;
    }
    if (!link.source && link.reads == 0) {
      multiply_matrix(link, link.values, link.values_batch, dtype, wide, batch);
      continue;
    }
    // Most of what is written is in a core's cache when it is multiplied.
    with_index(wide, [&](auto* i) {
      with_element<c10::Half, c10::BFloat16>(dtype, [&](auto* t) {
        const auto values =
            written<std::remove_pointer_t<decltype(i)>, std::remove_pointer_t<decltype(t)>>(link, batch);
        multiply_matrix(link, values.data(), link.source ? 0 : link.nnz, dtype, wide, batch);
      });
    });
  }
}

std::vector<at::Tensor> forward_cpu(const at::Tensor& grad, at::TensorList crows, at::TensorList cols,
                                    at::TensorList values) {
  return csr_chain_forward(chain_cpu, grad, crows, cols, values);
}

std::vector<at::Tensor> layers_cpu(const at::Tensor& grad, at::TensorList crows, at::TensorList cols,
                                   at::TensorList values, at::TensorList sources, at::IntArrayRef reads) {
  return csr_chain_forward(chain_cpu, grad, crows, cols, values, sources, reads);
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CPU, m) {
  m.impl("csr_chain", forward_cpu);
  m.impl("layer_chain", layers_cpu);
}

}  // namespace weft::sparse
