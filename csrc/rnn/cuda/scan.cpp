// weft::scan_rnn on CUDA: types, allocation, choice of the kernels.
#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/_cudnn_rnn.h>
#include <ATen/ops/_cudnn_rnn_flatten_weight.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cudnn_is_acceptable.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gru.h>
#include <ATen/ops/lstm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/rnn_relu.h>
#include <ATen/ops/rnn_tanh.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <tuple>
#include <vector>

#include "common/tensor.h"
#include "rnn/cuda/scan.h"
#include "scan/linear_scan.h"
#include "scan/scan_rnn.h"

namespace weft {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Inputs up to this width share the kernels of the gradients with the recurrent side; wider ones are GEMMs.
constexpr int64_t kMaxFusedInputs = 128;

// A tensor that is as it should be does not go through the dispatcher.
Tensor in_type(const Tensor& t, at::ScalarType type) {
  return t.scalar_type() == type ? t.contiguous() : t.to(type).contiguous();
}
Tensor in_type(const OptionalTensor& t, at::ScalarType type) {
  return t ? in_type(*t, type) : Tensor();
}

// The results of a forward: output, h_n, c_n and, with save, gates and cells.
struct Results {
  Tensor output, h_n, c_n, gates, cells;
  std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> tuple() const { return {output, h_n, c_n, gates, cells}; }
};

Results allocate(Cell cell, const ScanRnnSizes& s, const Tensor& input, bool save) {
  const bool lstm = cell == Cell::kLstm;
  const auto options = input.options();
  const auto saved = options.dtype(accumulate_type(input.scalar_type()));
  Results r;
  r.output = at::empty({s.T, s.B, s.H}, options);
  r.h_n = at::empty({1, s.B, s.H}, options);
  r.c_n = lstm ? at::empty({1, s.B, s.H}, options) : at::empty({0}, options);
  r.gates = save && has_gates(cell) ? at::empty({s.T, s.B, 4 * s.H}, saved) : at::empty({0}, saved);
  r.cells = save && lstm ? at::empty({s.T, s.B, s.H}, saved) : at::empty({0}, saved);
  return r;
}

ScanRnnShape shape_of(const char* op, Cell cell, const ScanRnnSizes& s, bool reverse) {
  TORCH_CHECK(s.T < std::numeric_limits<int>::max(), op, ": input may have at most 2^31 - 2 time steps, got ", s.T);
  return {cell, s.T, s.B, static_cast<int>(s.H), reverse};
}

// The forward kernels, and those of what the gate gradients become, hold H <= kScanRnnSmallHidden.
bool is_small(const ScanRnnSizes& s) {
  return s.H > 0 && s.H <= kScanRnnSmallHidden;
}

// Whether the chain has a kernel. Where it has none, it runs step by step in ATen.
bool has_chain_kernel(Cell cell, const ScanRnnSizes& s, at::ScalarType compute) {
  return is_small(s) || (s.H > 0 && s.H <= scan_rnn_max_hidden(cell) && compute == at::kFloat);
}

// cuDNN refuses sequences of more than 65,535 steps, and leaves its memory where a call has more than 2^31 values, of
// which a GRU has twice as many as gates (torch 2.11). So many steps at a time are well within both.
int64_t steps_at_a_time(int64_t gates_of_a_step) {
  return std::clamp<int64_t>(std::numeric_limits<int>::max() / 4 / std::max<int64_t>(1, gates_of_a_step), 1, 32768);
}

// torch's kernel for one layer and one direction: cuDNN, or what torch has where the user or the sizes forbid that.
// Longer sequences than it takes run in parts, the state handed on.
void forward_by_torch(Cell cell, bool reverse, const Tensor& input, const Tensor& h0, const Tensor& c0,
                      const Tensor& w_ih, const Tensor& w_hh, const Tensor& b_ih, const Tensor& b_hh,
                      Results& results) {
  const bool bias = b_ih.defined(), lstm = cell == Cell::kLstm;
  const Tensor steps = reverse ? input.flip(0) : input;
  Tensor h = h0, c = c0;
  std::vector<Tensor> weights = {w_ih, w_hh};
  if (bias) weights.insert(weights.end(), {b_ih, b_hh});
  const bool cudnn = at::cudnn_is_acceptable(steps);
  const int64_t mode = cell == Cell::kRnnRelu ? 0 : cell == Cell::kRnnTanh ? 1 : lstm ? 2 : 3;  // cudnnRNNMode_t
  Tensor buffer;
  if (cudnn) {
    // at::lstm and its kin end in the same kernel, and warn of weights that do not lie in one piece of memory. These
    // are moved into one; the aliases follow them there, the caller's tensors stay where they are.
    for (Tensor& w : weights) w = at::alias(w);
    buffer = at::_cudnn_rnn_flatten_weight(weights, int64_t(weights.size()), input.size(2), mode, h0.size(2),
                                           /*proj_size=*/0, /*num_layers=*/1, /*batch_first=*/false,
                                           /*bidirectional=*/false);
  }
  auto run = [&](const Tensor& part) {
    Tensor output;
    if (cudnn) {
      std::tie(output, h, c, std::ignore, std::ignore) =
          at::_cudnn_rnn(part, weights, int64_t(weights.size()), buffer, h, lstm ? OptionalTensor(c) : std::nullopt,
                         mode, h0.size(2), /*proj_size=*/0, /*num_layers=*/1, /*batch_first=*/false, /*dropout=*/0.0,
                         /*train=*/false, /*bidirectional=*/false, {}, std::nullopt);
    } else if (lstm) {
      std::tie(output, h, c) = at::lstm(part, {h, c}, weights, bias, 1, 0.0, false, false, false);
    } else if (cell == Cell::kGru) {
      std::tie(output, h) = at::gru(part, h, weights, bias, 1, 0.0, false, false, false);
    } else if (cell == Cell::kRnnRelu) {
      std::tie(output, h) = at::rnn_relu(part, h, weights, bias, 1, 0.0, false, false, false);
    } else {
      std::tie(output, h) = at::rnn_tanh(part, h, weights, bias, 1, 0.0, false, false, false);
    }
    return output;
  };
  results.output.reset();  // torch allocates its own
  const int64_t most = steps_at_a_time(input.size(1) * w_hh.size(0));
  Tensor output;
  if (steps.size(0) <= most) {
    output = run(steps);
  } else {
    std::vector<Tensor> parts;
    for (const Tensor& part : steps.split(most)) parts.push_back(run(part));
    output = at::cat(parts);
  }
  results.output = reverse ? output.flip(0) : output.contiguous();
  results.h_n = h;
  if (lstm) results.c_n = c;
}

// The gates that torch's kernel keeps to itself, from its output: two matrix products over all steps and a pointwise
// kernel; the cells of an lstm are a diagonal scan over them.
void recover_gates(const ScanRnnShape& shape, const Tensor& input, const Tensor& h0, const Tensor& c0,
                   const Tensor& w_ih, const Tensor& w_hh, const Tensor& b_ih, const Tensor& b_hh,
                   const Results& results) {
  const int64_t T = shape.T, B = shape.B, H = shape.H, later = (T - 1) * B;
  const bool gru = shape.cell == Cell::kGru, bias = b_ih.defined();
  const Tensor gates = results.gates.view({T * B, 4 * H}), output = results.output.view({T * B, H});
  // The rows of all steps but the first, and those of the states before them.
  const Tensor after = gates.narrow(0, shape.reverse ? 0 : B, later),
               first = gates.narrow(0, shape.reverse ? later : 0, B),
               before = output.narrow(0, shape.reverse ? B : 0, later), start = h0.squeeze(0);
  const int64_t summed = gru ? 2 * H : 4 * H;  // columns where both sides are added

  Tensor entering = gates.narrow(1, 0, w_ih.size(0));
  const Tensor rows = input.view({T * B, input.size(2)});
  if (bias) {
    Tensor sum = b_ih.clone();
    sum.narrow(0, 0, summed).add_(b_hh.narrow(0, 0, summed));
    at::addmm_out(entering, sum, rows, w_ih.t());
  } else {
    at::mm_out(entering, rows, w_ih.t());
  }
  const Tensor w_summed = w_hh.narrow(0, 0, summed).t();
  after.narrow(1, 0, summed).addmm_(before, w_summed);
  first.narrow(1, 0, summed).addmm_(start, w_summed);
  if (gru) {
    const Tensor w_n = w_hh.narrow(0, 2 * H, H).t();
    Tensor m = after.narrow(1, 3 * H, H), m_first = first.narrow(1, 3 * H, H);
    if (bias) {
      const Tensor b_n = b_hh.narrow(0, 2 * H, H);
      at::addmm_out(m, b_n, before, w_n);
      at::addmm_out(m_first, b_n, start, w_n);
    } else {
      at::mm_out(m, before, w_n);
      at::mm_out(m_first, start, w_n);
    }
  }

  const Tensor into_cells = gru ? Tensor() : at::empty_like(results.cells);
  const auto stream = c10::cuda::getCurrentCUDAStream();
  if (gates.scalar_type() == at::kFloat) {
    scan_rnn_gates(shape, mutable_pointer<float>(gates), mutable_pointer<float>(into_cells), stream);
  } else {
    scan_rnn_gates(shape, mutable_pointer<double>(gates), mutable_pointer<double>(into_cells), stream);
  }
  if (!gru) {
    // c[t] = f c[t-1] + i g
    scan::linear_scan_cuda({results.gates.narrow(2, H, H), into_cells, c0.squeeze(0), /*diagonal=*/true, shape.reverse,
                            /*transpose=*/false},
                           results.cells);
  }
}

void chain_steps(Cell cell, bool reverse, const ScanRnnSizes& s, const Tensor& grad_output, const Tensor& grad_h_n,
                 const Tensor& grad_c_n, const Tensor& w_hh, const Tensor& h0, const Tensor& c0, const Tensor& output,
                 const Tensor& gates, const Tensor& cells, const Tensor& dgates, const Tensor& grad_h0,
                 const Tensor& grad_c0) {
  const int64_t H = s.H;
  const Tensor start = h0.squeeze(0);
  Tensor gh = grad_h_n.defined() ? grad_h_n.squeeze(0) : at::zeros_like(start), gc;
  if (cell == Cell::kLstm) gc = grad_c_n.defined() ? grad_c_n.squeeze(0) : at::zeros_like(start);
  for (int64_t step = s.T - 1; step >= 0; --step) {
    const int64_t t = reverse ? s.T - 1 - step : step, before = reverse ? t + 1 : t - 1;
    const Tensor dh = grad_output.defined() ? gh + grad_output[t] : gh;
    const Tensor d = dgates[t];
    auto block = [&](const Tensor& x, int64_t g) { return x.narrow(1, g * H, H); };
    if (cell == Cell::kGru) {
      const Tensor r = block(gates[t], 0), z = block(gates[t], 1), n = block(gates[t], 2), m = block(gates[t], 3);
      const Tensor h_prev = step > 0 ? output[before] : start;
      const Tensor dn = dh * (1 - z) * (1 - n * n);
      block(d, 0).copy_(dn * m * r * (1 - r));
      block(d, 1).copy_(dh * (h_prev - n) * z * (1 - z));
      block(d, 2).copy_(dn);
      block(d, 3).copy_(dn * r);
      gh = (z * dh).addmm(d.narrow(1, 0, 2 * H), w_hh.narrow(0, 0, 2 * H)).addmm(block(d, 3), w_hh.narrow(0, 2 * H, H));
    } else if (cell == Cell::kLstm) {
      const Tensor i = block(gates[t], 0), f = block(gates[t], 1), g = block(gates[t], 2), o = block(gates[t], 3);
      const Tensor y = at::tanh(cells[t]), c_prev = step > 0 ? cells[before] : c0[0];
      const Tensor q = gc + dh * o * (1 - y * y);
      block(d, 0).copy_(q * g * i * (1 - i));
      block(d, 1).copy_(q * c_prev * f * (1 - f));
      block(d, 2).copy_(q * i * (1 - g * g));
      block(d, 3).copy_(dh * y * o * (1 - o));
      gc = q * f;
      gh = at::mm(d, w_hh);
    } else {
      const Tensor y = output[t];
      d.copy_(cell == Cell::kRnnRelu ? at::where(y <= 0, at::zeros({}, y.options()), dh) : dh * (1 - y * y));
      gh = at::mm(d, w_hh);
    }
  }
  grad_h0.copy_(gh);
  if (cell == Cell::kLstm) grad_c0.copy_(gc);
}

template <typename scalar>
void forward_kernel(const ScanRnnShape& shape, const Tensor& projected, const Tensor& w_hh, const Tensor& b_hh,
                    const Tensor& h0, const Tensor& c0, const Results& r) {
  const ScanRnnForward<scalar> args{pointer<scalar>(projected),
                                    pointer<scalar>(w_hh),
                                    pointer<scalar>(b_hh),
                                    pointer<scalar>(h0),
                                    pointer<scalar>(c0),
                                    mutable_pointer<scalar>(r.output),
                                    mutable_pointer<scalar>(r.h_n),
                                    mutable_pointer<scalar>(r.c_n),
                                    mutable_pointer<scalar>(r.gates),
                                    mutable_pointer<scalar>(r.cells)};
  scan_rnn_forward(shape, args, c10::cuda::getCurrentCUDAStream());
}

template <typename scalar>
void chain_kernel(const ScanRnnShape& shape, const Tensor& grad_output, const Tensor& grad_h_n, const Tensor& grad_c_n,
                  const Tensor& w_hh, const Tensor& h0, const Tensor& c0, const Tensor& output, const Tensor& gates,
                  const Tensor& cells, const Tensor& dgates, const Tensor& grad_h0, const Tensor& grad_c0, int chunks,
                  const Tensor& workspace) {
  const ScanRnnChain<scalar> args{pointer<scalar>(grad_output),
                                  pointer<scalar>(grad_h_n),
                                  pointer<scalar>(grad_c_n),
                                  pointer<scalar>(w_hh),
                                  pointer<scalar>(h0),
                                  pointer<scalar>(c0),
                                  pointer<scalar>(output),
                                  pointer<scalar>(gates),
                                  pointer<scalar>(cells),
                                  mutable_pointer<scalar>(dgates),
                                  mutable_pointer<scalar>(grad_h0),
                                  mutable_pointer<scalar>(grad_c0),
                                  workspace.data_ptr()};
  scan_rnn_chain(shape, args, chunks, c10::cuda::getCurrentCUDAStream());
}

// out (M,N) = left (R,M)^T right (R,N)
void transposed_product(Tensor out, const Tensor& left, const Tensor& right) {
  at::mm_out(out, left.t(), right);
}

// The second stage of the backward: from the gradient before every nonlinearity to the gradients of input and
// parameters, matrix products over T*B rows in the dtype of input: those of the half types are the fast ones, and
// accumulate in float32.
//
// dgates (T,B,K*H) as chain_blocks describes it, accumulate type, contiguous. grad_h0 and grad_c0 (1,B,H) are passed
// through, cast to h0's dtype; they may be undefined where the mask does not ask for them. Gradients that the mask does
// not ask for come back undefined.
ScanRnnGrads parameter_grads(const Tensor& dgates, const Tensor& input, const Tensor& h0, const Tensor& output,
                             bool reverse, const Tensor& w_ih, const Tensor& w_hh, bool bias, Cell cell,
                             const std::array<bool, 7>& mask, const Tensor& grad_h0, const Tensor& grad_c0) {
  const int64_t T = input.size(0), B = input.size(1), I = input.size(2), H = h0.size(2);
  const int64_t rows = gate_blocks(cell) * H;
  const auto type = input.scalar_type();
  const bool gru = cell == Cell::kGru;
  Tensor grad_input, grad_w_ih, grad_w_hh, grad_b_ih, grad_b_hh;
  const bool products = mask[0] || mask[3] || mask[4];
  const Tensor d = products ? dgates.to(type) : dgates;  // (T, B, K*H)
  const Tensor d_in = mask[0] || mask[3] ? d.view({T * B, d.size(2)}).narrow(1, 0, rows) : Tensor();

  if (mask[0]) grad_input = at::mm(d_in, w_ih).view({T, B, I});
  if (mask[3]) {
    grad_w_ih = at::empty({rows, I}, input.options());
    transposed_product(grad_w_ih, d_in, input.reshape({T * B, I}));
  }
  if (mask[4]) {
    if (T == 0) {
      grad_w_hh = at::zeros({rows, H}, w_hh.options());
    } else {
      // The state before each step is h0 and then the output shifted by one: two products instead of a shifted copy.
      const int64_t n = (T - 1) * B;
      const Tensor later = d.narrow(0, reverse ? 0 : 1, T - 1).reshape({n, d.size(2)});
      const Tensor before = output.narrow(0, reverse ? 1 : 0, T - 1).reshape({n, H});
      const Tensor first = d.select(0, reverse ? T - 1 : 0);  // (B, K*H)
      grad_w_hh = at::empty({rows, H}, input.options());
      auto part = [&](int64_t row, int64_t column, int64_t count) {
        Tensor out = grad_w_hh.narrow(0, row, count);
        transposed_product(out, later.narrow(1, column, count), before);
        out.addmm_(first.narrow(1, column, count).t(), h0[0]);
      };
      if (gru) {
        part(0, 0, 2 * H);
        part(2 * H, 3 * H, H);
      } else {
        part(0, 0, rows);
      }
    }
  }
  if (bias && (mask[5] || mask[6])) {
    const Tensor sums = dgates.sum(at::IntArrayRef{0, 1});  // (K*H)
    // A fresh copy each: results of an op must not share memory.
    if (mask[5]) grad_b_ih = sums.narrow(0, 0, rows).to(type, /*non_blocking=*/false, /*copy=*/true);
    if (mask[6]) {
      grad_b_hh =
          gru ? at::cat({sums.narrow(0, 0, 2 * H), sums.narrow(0, 3 * H, H)}).to(type) : sums.to(type, false, true);
    }
  }
  return {grad_input,
          mask[1] ? in_type(grad_h0, type) : Tensor(),
          mask[2] && cell == Cell::kLstm ? in_type(grad_c0, type) : Tensor(),
          grad_w_ih,
          grad_w_hh,
          grad_b_ih,
          grad_b_hh};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> scan_rnn_cuda(const Tensor& input, const Tensor& h0,
                                                                 const OptionalTensor& c0, const Tensor& w_ih,
                                                                 const Tensor& w_hh, const OptionalTensor& b_ih,
                                                                 const OptionalTensor& b_hh, c10::string_view cell_name,
                                                                 bool reverse, bool save) {
  const char* op = "weft::scan_rnn";
  const Cell cell = parse_cell(op, cell_name);
  const auto s = check_scan_rnn(op, cell, input, h0, c0, w_ih, w_hh, b_ih, b_hh);
  const ScanRnnShape shape = shape_of(op, cell, s, reverse);
  const c10::cuda::CUDAGuard guard(input.device());
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto type = input.scalar_type(), compute = accumulate_type(type);

  const Tensor x = in_type(input, compute), w = in_type(w_hh, compute), w_in = in_type(w_ih, compute),
               bias_in = in_type(b_ih, compute), bias = in_type(b_hh, compute), state = in_type(h0, compute),
               cell_state = in_type(c0, compute);
  Results results = allocate(cell, s, x, save);
  if (results.output.numel() == 0) {
    results.h_n.copy_(state);
    if (cell == Cell::kLstm) results.c_n.copy_(cell_state);
  } else if (is_small(s)) {
    // The kernels keep fp32's digits, and so do the matrix products around them.
    const at::NoTF32Guard no_tf32;
    const Tensor rows = x.view({s.T * s.B, s.I}), right = w_in.t();
    const Tensor projected = bias.defined() ? at::addmm(bias_in, rows, right) : at::mm(rows, right);
    if (compute == at::kFloat) {
      forward_kernel<float>(shape, projected, w, bias, state, cell_state, results);
    } else {
      forward_kernel<double>(shape, projected, w, bias, state, cell_state, results);
    }
  } else {
    forward_by_torch(cell, reverse, x, state, cell_state, w_in, w, bias_in, bias, results);
    if (results.gates.dim() == 3) {
      const at::NoTF32Guard no_tf32;
      recover_gates(shape, x, state, cell_state, w_in, w, bias_in, bias, results);
    }
  }
  results.output = in_type(results.output, type);
  results.h_n = in_type(results.h_n, type);
  results.c_n = in_type(results.c_n, type);
  return results.tuple();
}

ScanRnnGrads scan_rnn_backward_cuda(const OptionalTensor& grad_output, const OptionalTensor& grad_h_n,
                                    const OptionalTensor& grad_c_n, const Tensor& input, const Tensor& h0,
                                    const OptionalTensor& c0, const Tensor& w_ih, const Tensor& w_hh,
                                    const OptionalTensor& b_ih, const OptionalTensor& b_hh, const Tensor& output,
                                    const Tensor& gates, const Tensor& cells, c10::string_view cell_name, bool reverse,
                                    std::array<bool, 7> mask) {
  const char* op = "weft::scan_rnn_backward";
  const Cell cell = parse_cell(op, cell_name);
  const auto s = check_scan_rnn(op, cell, input, h0, c0, w_ih, w_hh, b_ih, b_hh);
  check_scan_rnn_saved(op, cell, s, input, grad_output, grad_h_n, grad_c_n, output, gates, cells);
  const ScanRnnShape shape = shape_of(op, cell, s, reverse);
  const c10::cuda::CUDAGuard guard(input.device());
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  // The kernels keep fp32's digits, and so do the matrix products around them.
  const at::NoTF32Guard no_tf32;
  const auto type = input.scalar_type(), compute = accumulate_type(type);

  const Tensor state = in_type(h0, compute), cell_state = in_type(c0, compute), w = in_type(w_hh, compute),
               saved_output = in_type(output, compute), saved_gates = gates.contiguous(),
               saved_cells = cells.contiguous(), arriving = in_type(grad_output, compute),
               arriving_h = in_type(grad_h_n, compute), arriving_c = in_type(grad_c_n, compute);
  const auto options = state.options();
  // What the kernels make of dgates. The rest are GEMMs.
  const bool small = is_small(s) && compute == at::kFloat, narrow = s.I > 0 && s.I <= kMaxFusedInputs;
  const bool input_here = small && narrow && mask[0], w_ih_here = small && narrow && mask[3],
             parameters_here = small && (w_ih_here || mask[4] || mask[5] || mask[6]);
  std::array<bool, 7> by_gemm = mask;
  if (input_here) by_gemm[0] = false;
  if (w_ih_here) by_gemm[3] = false;
  if (small) by_gemm[4] = by_gemm[5] = by_gemm[6] = false;
  // One workspace: the gradients of the parameters start when the chain is through.
  const bool in_kernel = has_chain_kernel(cell, s, compute);
  const int chunks = in_kernel && compute == at::kFloat ? scan_rnn_chunks(shape) : 1;
  const int inputs = static_cast<int>(narrow ? s.I : 0);
  const Tensor workspace =
      at::empty({std::max(in_kernel ? scan_rnn_chain_workspace(shape, chunks) : 0,
                          parameters_here ? scan_rnn_gradients_workspace(shape, w_ih_here ? inputs : 0) : 0)},
                options.dtype(at::kByte));
  const Tensor dgates = at::empty({s.T, s.B, chain_blocks(cell) * s.H}, options);
  Tensor grad_h0 = at::empty({1, s.B, s.H}, options);
  Tensor grad_c0 = cell == Cell::kLstm ? at::empty({1, s.B, s.H}, options) : Tensor();
  if (!in_kernel) {
    chain_steps(cell, reverse, s, arriving, arriving_h, arriving_c, w, state, cell_state, saved_output, saved_gates,
                saved_cells, dgates, grad_h0, grad_c0);
  } else if (compute == at::kFloat) {
    chain_kernel<float>(shape, arriving, arriving_h, arriving_c, w, state, cell_state, saved_output, saved_gates,
                        saved_cells, dgates, grad_h0, grad_c0, chunks, workspace);
  } else {
    chain_kernel<double>(shape, arriving, arriving_h, arriving_c, w, state, cell_state, saved_output, saved_gates,
                         saved_cells, dgates, grad_h0, grad_c0, chunks, workspace);
  }

  ScanRnnGrads grads = parameter_grads(dgates, input, h0, output, reverse, w_ih, w_hh, b_ih.has_value(), cell, by_gemm,
                                       grad_h0, grad_c0);
  if (input_here || parameters_here) {
    const int64_t rows = s.gates * s.H;
    const bool bias = b_ih.has_value();
    auto wanted = [&](bool asked, at::IntArrayRef sizes) { return asked ? at::empty(sizes, options) : Tensor(); };
    const Tensor x = w_ih_here ? in_type(input, compute) : Tensor(),
                 w_in = input_here ? in_type(w_ih, compute) : Tensor();
    const Tensor d_input = wanted(input_here, {s.T, s.B, s.I}), d_w_ih = wanted(w_ih_here, {rows, s.I}),
                 d_w_hh = wanted(mask[4], {rows, s.H}), d_b_ih = wanted(bias && mask[5], {rows}),
                 d_b_hh = wanted(bias && mask[6], {rows});
    const ScanRnnGradients<float> args{inputs,
                                       pointer<float>(dgates),
                                       pointer<float>(state),
                                       pointer<float>(saved_output),
                                       pointer<float>(x),
                                       pointer<float>(w_in),
                                       mutable_pointer<float>(d_input),
                                       mutable_pointer<float>(d_w_ih),
                                       mutable_pointer<float>(d_w_hh),
                                       mutable_pointer<float>(d_b_ih),
                                       mutable_pointer<float>(d_b_hh),
                                       workspace.data_ptr()};
    scan_rnn_gradients(shape, args, c10::cuda::getCurrentCUDAStream());
    auto put = [&](Tensor& grad, const Tensor& found) {
      if (found.defined()) grad = in_type(found, type);
    };
    put(std::get<0>(grads), d_input);
    put(std::get<3>(grads), d_w_ih);
    put(std::get<4>(grads), d_w_hh);
    put(std::get<5>(grads), d_b_ih);
    put(std::get<6>(grads), d_b_hh);
  }
  return without_undefined(grads, input);
}

TORCH_LIBRARY_IMPL(weft, CUDA, m) {
  m.impl("scan_rnn", &scan_rnn_cuda);
  m.impl("scan_rnn_backward", &scan_rnn_backward_cuda);
}

}  // namespace
}  // namespace weft
