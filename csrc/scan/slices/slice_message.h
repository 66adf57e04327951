// What one rank does to its slice of a diagonal linear_scan whose whole lies on many ranks: weft.distributed scans the
// slice from zero, tells the others its map x -> product x + value, and mends its states where the state that comes in
// still shows. Of a net that forgets, that is a few hundred steps, however long the slice is.
//
// slice_message(A, value, leaves) -> message
//   A        (T, B, H), float32, float64 or bfloat16, any strides
//   value    (B, H), what leaves the slice where nothing comes in
//   leaves   whether anything does: not from an empty slice without a state
//   message  (2 B H + 1), int32, int64 of float64: the packed product of A over all steps, the bits of value, `leaves`
// slice_states(messages, value, order, reverse, matrices=0, shares=False) -> (entered, end, products, came)
//   messages of all ranks (R, 2 B H + 1), in order of rank; `order`, this one's place in the scan, which with `reverse`
//   begins at the last rank. matrices: of a dense scan, 1 or B; messages are (R, matrices H H + B H + 1) then,
//   and with `shares` B H longer: the bits of each rank's share of the state that enters the first, zeros without
//   entered  (B, H), what comes into this slice, zeros for nothing; end (B, H), what leaves the last
//   products (R, B, H) or (R, matrices, H, H), float64, in the order of the scan, zero where nothing comes in; came
//   (1), int32: whether it does
// slice_left(messages, products, order, reverse) -> left
//   messages (R, B, H), in order of rank: the gradient that each rank's slice gives to the state before it, where
//   nothing enters its end; or (R, 2, B, H), with each rank's share of the gradient of what leaves the last left (B,
//   H), the gradient of the state that leaves this slice
// slice_mend_(x, A, state, came, reverse)
//   x        (T, B, H), scanned from zero, becomes the scan from `state` (B, H)
// slice_mend_gradients_(grad_b, grad_A, A, x, first, state, reverse)
//   grad_b, grad_A  (T, B, H), of a scan whose end has no gradient, become those of one whose end has `state` (B, H);
//   grad_A may be none, and stays where grad_b does. x are the scan's states, `first` the one before them, none for
//   zeros, where A of the first step is not read. `reverse` is the scan's.
// slice_finish_(x, A, messages, order, reverse) -> (entered, end, products)
//   slice_states and, on all but the first rank, slice_mend_, of float32 or float64
// slice_finish_gradients_(grad_b, grad_A, A, x, start, messages, products, order, reverse) -> left
//   slice_left, of messages (R, 1, B, H) or (R, 2, B, H), and slice_mend_gradients_, `start` being `first`
//
// One dtype, float32 or float64, but that of integers; with steps (T, B, H) in bfloat16 rows (B, H) are float32. What
// is changed in place overlaps nothing else. Products are carried in double, a state that has ceased to change the
// slice is dropped, to the rounding of a float also in bfloat16: to the slice's rounding that is the scan from that
// state. Deterministic; channels are independent. No autograd of their own: weft::slice_scan, which calls them, has it.
// Source: BPPSA (Wang, Bai, Pekhimenko, MLSys 2020), section 3, cut by devices.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "scan/slices/slice_args.h"

namespace weft::scan {

using States = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using Finished = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// What a device runs.
struct SliceKernels {
  // Writes the message.
  void (*message)(const SliceProduct& product, const at::Tensor& value, bool leaves, const at::Tensor& message);
  void (*states)(const SliceStates& states);
  void (*gradients)(const SliceGradients& gradients);
  void (*mend)(const SliceMend& mend);
  // The one and then the other, of diagonals; mend.state is not given.
  void (*finish)(const SliceMend& mend, const SliceStates& states);
  void (*finish_gradients)(const SliceMend& mend, const SliceGradients& gradients);
};

// The operators on any device.
at::Tensor slice_message(const SliceKernels& kernels, const at::Tensor& A, const at::Tensor& value, bool leaves);
States slice_states(const SliceKernels& kernels, const at::Tensor& messages, const at::Tensor& value, int64_t order,
                    bool reverse, int64_t matrices, bool shares);
at::Tensor slice_left(const SliceKernels& kernels, const at::Tensor& messages, const at::Tensor& products,
                      int64_t order, bool reverse);
void slice_mend(const SliceKernels& kernels, const at::Tensor& x, const at::Tensor& A, const at::Tensor& state,
                const std::optional<at::Tensor>& came, bool reverse);
void slice_mend_gradients(const SliceKernels& kernels, const at::Tensor& grad_b,
                          const std::optional<at::Tensor>& grad_A, const at::Tensor& A,
                          const std::optional<at::Tensor>& x, const std::optional<at::Tensor>& first,
                          const at::Tensor& state, bool reverse);
Finished slice_finish(const SliceKernels& kernels, const at::Tensor& x, const at::Tensor& A, const at::Tensor& messages,
                      int64_t order, bool reverse);
at::Tensor slice_finish_gradients(const SliceKernels& kernels, const at::Tensor& grad_b,
                                  const std::optional<at::Tensor>& grad_A, const at::Tensor& A, const at::Tensor& x,
                                  const std::optional<at::Tensor>& start, const at::Tensor& messages,
                                  const at::Tensor& products, int64_t order, bool reverse);

}  // namespace weft::scan
