// What a rank does to its slice of a diagonal linear_scan before it hears of the others, in one call, so that the host
// is soon where the exchange is: linear_scan, and what slice_message.h's ops tell. What comes after is slice_finish_
// there.
//
// slice_begin(A, b, x0, first, reverse) -> (x, message)
//   A, b     (T, B, H), T >= 1, float32 or float64; x0 (B, H), (H) or none, given on the first rank alone
//   first    whether this is the scan's first rank, whose product nobody asks for
//   x        (T, B, H), the scan from x0 or from zero; message, what slice_message tells of it
// slice_begin_gradients(grad, grad_entered, grad_end, A, x, start, first, reverse, of_A) -> (grad_A, grad_b, message)
//   grad     (T, B, H), of x; grad_entered (B, H) or none, of the state that enters; grad_end (B, H) or none, this
//            rank's share of that of the whole's end
//   start    (B, H), the state before the slice, or none for zeros; given on all ranks but the first
//   grad_A, grad_b  (T, B, H), where the state that leaves has no gradient; grad_A is empty without of_A
//   message  (1, B, H) or (2, B, H), for slice_left: what the slice gives to the state before it, zeros on the first
//            rank, where nobody asks, and grad_end
//
// Deterministic; no autograd of their own: weft::slice_scan has it. Errors as of the ops that they are made of.
// Source: BPPSA (Wang, Bai, Pekhimenko, MLSys 2020), section 3, cut by devices.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "scan/linear/linear_scan.h"

namespace weft::scan {

// Scans into `out` and writes the message, or does neither and returns false.
using ScanTold = bool (*)(const Problem& problem, const at::Tensor& out, const at::Tensor& message);

std::tuple<at::Tensor, at::Tensor> slice_begin(ScanTold scan, const at::Tensor& A, const at::Tensor& b,
                                               const std::optional<at::Tensor>& x0, bool first, bool reverse);
std::tuple<at::Tensor, at::Tensor, at::Tensor> slice_begin_gradients(const at::Tensor& grad,
                                                                     const std::optional<at::Tensor>& grad_entered,
                                                                     const std::optional<at::Tensor>& grad_end,
                                                                     const at::Tensor& A, const at::Tensor& x,
                                                                     const std::optional<at::Tensor>& start, bool first,
                                                                     bool reverse, bool of_A);

}  // namespace weft::scan
