// pointwise_scan(init, inputs, parameters, program, *, stacked, reverse, algorithm, name) -> states
//
//   h[t] = step(h[t-1], x[t], p),  h[-1] = init        reverse:   h[t] = step(h[t+1], x[t], p),  h[T] = init
//
// for every channel by itself.
//
// init        S tensors of one shape, the state: N channels
// inputs      I tensors (T, *shape). stacked: one tensor (T, O, I, W) with O W = N, input i of channel n at
//             [t, n / W, i, n % W]
// parameters  P tensors that broadcast to that shape
// program     the step's text, python/weft/_scan/step_program.py
// algorithm   "auto"; "walk", step after step; "newton", chunks of time, of which each takes a sixteenth of a
//             microsecond's worth of steps at least
// name        of the caller, for weft.scan.newton_report
// states      S tensors (T, *shape), new and contiguous; they alias nothing
// dtypes      float16, bfloat16, float32, float64, one for all. Half types compute and carry in float32 and round once.
//
// T and N may be 0. Inputs may have any strides. Deterministic: two runs give the same bits. Channels are independent:
// NaN or inf in one touches no other. Every step satisfies the recurrence, across chunks too, to 2^-20 max(1, |h|)
// (2^-48 in float64). Errors: TypeError for dtypes, ValueError for shapes, RuntimeError for devices; each names the
// argument.
//
// pointwise_scan_backward(grads, init, inputs, parameters, states, program, *, stacked, reverse, algorithm,
// output_mask)
// -> the gradients of init, inputs and parameters, one after the other, (0) where masked out. grads: of the states,
// none for zero. Under create_graph its derivatives are those of a loop of torch's operations.
//
// Source: Newton's method for recurrences, Lim et al., "Parallelizing non-linear sequential models over the sequence
// length" (ICLR 2024); for steps that are channels of their own Danieli et al., "ParaRNN" (2025). Here it mends the
// seams of chunks that are walked.
#pragma once
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/op_handle.h"
#include "scan/pointwise/pointwise_args.h"
#include "scan/pointwise/program.h"

namespace weft::scan {

using OptionalTensors = c10::List<std::optional<at::Tensor>>;

inline const OpHandle<std::vector<at::Tensor>(at::TensorList, at::TensorList, at::TensorList, c10::string_view, bool,
                                              bool, c10::string_view, c10::string_view)>
    pointwise_scan_op("weft::pointwise_scan");
inline const OpHandle<std::vector<at::Tensor>(const OptionalTensors&, at::TensorList, at::TensorList, at::TensorList,
                                              at::TensorList, c10::string_view, bool, bool, c10::string_view,
                                              c10::List<bool>)>
    pointwise_scan_backward_op("weft::pointwise_scan_backward");

// A checked problem.
struct Pointwise {
  const StepProgram* step;
  std::vector<at::Tensor> init, inputs, parameters;
  bool stacked, reverse, chunks_allowed, chunks_wanted;  // by the algorithm
  int64_t T, N;
  at::ScalarType dtype, acc;

  at::IntArrayRef shape() const { return init[0].sizes(); }
  std::vector<int64_t> states_shape() const;
  bool empty() const { return T == 0 || N == 0; }
};

Pointwise check_pointwise(const char* op, at::TensorList init, at::TensorList inputs, at::TensorList parameters,
                          c10::string_view program, bool stacked, bool reverse, c10::string_view algorithm);

// How time is cut: into `chunks` of `chunk` steps, a multiple of `batch`; the last may be shorter.
struct PointwisePlan {
  int64_t chunks, chunk;
};
// `busy`: channels that fill the device, of which half are enough not to cut at all.
PointwisePlan plan_pointwise(int64_t T, int64_t N, int64_t batch, int64_t busy, bool allowed, bool wanted);

// What a call of these sizes runs with on a device, the current one of CUDA's.
PointwisePlan plan_on_cpu(int64_t T, int64_t N, bool allowed, bool wanted);
PointwisePlan plan_on_cuda(int64_t T, int64_t N, int64_t inputs, bool allowed, bool wanted);

// The operands of a problem as kernels want them. A tensor whose strides they cannot express is copied to `kept`.
PointwiseArgs describe_pointwise(const Pointwise& problem, const PointwisePlan& plan, std::vector<at::Tensor>& kept);

// (T, *shape), or without `timed` (*shape), as an operand.
PointwiseOperand describe_channels(const at::Tensor& t, bool timed, std::vector<at::Tensor>& kept);

// The gradients of a backward pass: new tensors for what is wanted, and what kernels write, in `args`.
class PointwiseGradients {
 public:
  // Fills `args` with grads, states and results.
  PointwiseGradients(const Pointwise& problem, const OptionalTensors& grads, at::TensorList states,
                     const c10::List<bool>& output_mask, const PointwisePlan& plan, PointwiseArgs& args,
                     std::vector<at::Tensor>& kept);
  uint64_t wanted() const { return wanted_; }  // bits
  uint32_t given() const { return given_; }    // bits: states that have a gradient
  // What the operator returns, after the kernels.
  std::vector<at::Tensor> results();

 private:
  const Pointwise& problem_;
  std::vector<at::Tensor> made_;
  at::Tensor sums_;  // (chunks, P, N)
  uint64_t wanted_ = 0;
  uint32_t given_ = 0;
};

// For each state, input and parameter its gradient by a loop of torch's operations, undefined where masked out.
std::vector<at::Tensor> pointwise_backward_reference(const Pointwise& problem, const OptionalTensors& grads,
                                                     const c10::List<bool>& output_mask);

}  // namespace weft::scan
