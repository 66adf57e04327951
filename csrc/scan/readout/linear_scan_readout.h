// linear_scan_readout(A, b, c, x0=None, *, reverse=False, batch_first=False, save=False) -> (y, starts)
//
//   y[t] = sum over n of c[t] x[t],  x[t] = A[t] * x[t-1] + b[t] element by element,  x[-1] = x0
//   reverse: x[t] = A[t] * x[t+1] + b[t], x[T] = x0
//
// The states x (T, B, H, N) are never written.
//
// A, c   (H, N), or (T or 1, B or 1, H, N): what has size 1 is shared
// b      (T, B, H, N), or (T, B, H, 1): one number for all n
// x0     (B, H, N), or (H, N) shared by the batch, or none for zeros: A at the first step is then not used
// y      (T, B, H), new and contiguous
// starts with save: the states that the gradients begin from, (segments, B, H, N), see readout_args.h; else (0). The
//        autograd kernel asks for them.
// batch_first: (B, T, ...) in the place of (T, B, ...) everywhere but in starts.
// dtypes float16, bfloat16, float32, float64, complex64, complex128, one for all; the state, and the sum over n, are
//        carried as linear_scan carries its state.
//
// linear_scan_readout_backward(grad, A, b, c, x0, starts, reverse, batch_first, output_mask) -> gradients of A, b, c,
// x0, undefined where masked out:
//   lambda[t] = conj(A[t+1]) lambda[t+1] + conj(c[t]) grad[t]
//   grad_A[t] = lambda[t] conj(x[t-1]),  grad_b = lambda,  grad_c[t] = grad[t] conj(x[t]),  grad_x0 = conj(A[0])
//   lambda[0],
// each summed where the argument is broadcast, over T in fp64. Under create_graph it is made of differentiable ops,
// with states that are written.
//
// Any size may be 0. Deterministic. Rows of the batch are independent. The states are those of the recurrence, step by
// step, on both devices. Errors: TypeError for dtypes, ValueError for shapes, RuntimeError for devices.
//
// Source: S4D (Gu et al., NeurIPS 2022) and S5 (Smith et al., ICLR 2023) write such layers; not writing the states is
// Mamba's (Gu and Dao, 2023).
#pragma once
#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>

#include "common/op_handle.h"
#include "scan/readout/readout_args.h"

namespace weft::scan::read_out {

using ReadOutGradientsOf = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// What runs on a device; null where it cannot, and ATen operations around linear_scan do.
using ReadOutInto = void (*)(const ReadOut&, const at::Tensor& like);
using ReadOutGradientsInto = void (*)(const ReadOutGradients&, const at::Tensor& like);

std::tuple<at::Tensor, at::Tensor> readout_forward(ReadOutInto run, const at::Tensor& A, const at::Tensor& b,
                                                   const at::Tensor& c, const std::optional<at::Tensor>& x0,
                                                   bool reverse, bool batch_first, bool save);
ReadOutGradientsOf readout_gradients(ReadOutGradientsInto run, const at::Tensor& grad, const at::Tensor& A,
                                     const at::Tensor& b, const at::Tensor& c, const std::optional<at::Tensor>& x0,
                                     const at::Tensor& starts, bool reverse, bool batch_first,
                                     std::array<bool, 4> output_mask);

// The same of differentiable operations, linear_scan among them.
at::Tensor composed_readout(const at::Tensor& A, const at::Tensor& b, const at::Tensor& c,
                            const std::optional<at::Tensor>& x0, bool reverse, bool batch_first);
ReadOutGradientsOf composed_readout_gradients(const at::Tensor& grad, const at::Tensor& A, const at::Tensor& b,
                                              const at::Tensor& c, const std::optional<at::Tensor>& x0, bool reverse,
                                              bool batch_first, std::array<bool, 4> output_mask);

inline const OpHandle<std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                         const std::optional<at::Tensor>&, bool, bool, bool)>
    linear_scan_readout_op("weft::linear_scan_readout");
inline const OpHandle<ReadOutGradientsOf(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                         const std::optional<at::Tensor>&, const at::Tensor&, bool, bool,
                                         std::array<bool, 4>)>
    linear_scan_readout_backward_op("weft::linear_scan_readout_backward");

}  // namespace weft::scan::read_out
