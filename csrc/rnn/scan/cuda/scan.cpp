#include "rnn/scan/cuda/scan.h"

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_cudnn_rnn.h>
#include <ATen/ops/_cudnn_rnn_flatten_weight.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cudnn_is_acceptable.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <array>
#include <limits>
#include <tuple>
#include <type_traits>
#include <utility>

#include "common/autograd.h"
#include "common/tensor.h"
#include "rnn/newton/cuda/newton_kernels.h"
#include "rnn/newton/report.h"
#include "rnn/report.h"
#include "rnn/scan/cuda/scan_kernels.h"
#include "scan/linear/linear_scan.h"

namespace weft::rnn {
namespace {

using at::Tensor;

// Inputs up to this width share the kernels of the gradients with the recurrent side; wider ones are GEMMs.
constexpr int64_t kMaxFusedInputs = 128;

// A tensor that is as it should be does not go through the dispatcher; one that is not there stays so.
Tensor contiguous_in(const Tensor& t, at::ScalarType type) {
  if (!t.defined()) return t;
  return t.scalar_type() == type ? t.contiguous() : t.to(type).contiguous();
}
Tensor contiguous_in(const OptionalTensor& t, at::ScalarType type) {
  return t ? contiguous_in(*t, type) : Tensor();
}

// One direction of a tensor with D in front, and of one whose columns are both directions'; what is not there stays so.
Tensor direction_of(const Tensor& t, const RnnSizes& s, int d) {
  return s.D == 1 || !t.defined() || t.dim() != 3 ? t : t.narrow(0, d, 1);
}
Tensor columns_of(const Tensor& t, const RnnSizes& s, int d) {
  return s.D == 1 || !t.defined() || t.dim() != 3 ? t : t.narrow(2, d * s.H, s.H);
}

// h0 and, where the cell has it, c0 (D,B,H) in `compute`; zeros where they are not given.
std::pair<Tensor, Tensor> initial_state(const RnnArgs& args, const RnnSizes& s, at::ScalarType compute) {
  if (args.h0) return {contiguous_in(*args.h0, compute), contiguous_in(args.c0, compute)};
  const Tensor zeros = at::zeros({s.D, s.B, s.H}, args.input.options().dtype(compute));
  return {zeros, has_c(args.cell) ? zeros : Tensor()};
}

ScanShape shape_of(const RnnArgs& args, const RnnSizes& s, int d) {
  return {args.cell, s.T, s.B, static_cast<int>(s.H), /*reverse=*/d == 1};
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
                      RnnResults& results) {
  const bool bias = b_ih.defined(), with_c = has_c(cell);
  const Tensor steps = reverse ? input.flip(0) : input;
  Tensor h = h0, c = c0;
  std::vector<Tensor> weights = {w_ih, w_hh};
  if (bias) weights.insert(weights.end(), {b_ih, b_hh});
  const bool cudnn = at::cudnn_is_acceptable(steps);
  const int64_t mode = kCells[int(cell)].cudnn_mode;
  Tensor buffer;
  if (cudnn) {
    // torch's own functions end in the same kernel, and warn of weights that do not lie in one piece of memory. These
    // are moved into one; the aliases follow them there, the caller's tensors stay where they are.
    for (Tensor& w : weights) w = at::alias(w);
    buffer = at::_cudnn_rnn_flatten_weight(weights, int64_t(weights.size()), input.size(2), mode, h0.size(2),
                                           /*proj_size=*/0, /*num_layers=*/1, /*batch_first=*/false,
                                           /*bidirectional=*/false);
  }
  const auto torchs =
      c10::Dispatcher::singleton().findSchemaOrThrow((std::string("aten::") + kCells[int(cell)].name).c_str(), "input");
  auto run = [&](const Tensor& part) {
    Tensor output;
    if (cudnn) {
      std::tie(output, h, c, std::ignore, std::ignore) =
          at::_cudnn_rnn(part, weights, int64_t(weights.size()), buffer, h, with_c ? OptionalTensor(c) : std::nullopt,
                         mode, h0.size(2), /*proj_size=*/0, /*num_layers=*/1, /*batch_first=*/false, /*dropout=*/0.0,
                         /*train=*/false, /*bidirectional=*/false, {}, std::nullopt);
    } else if (with_c) {
      using Signature = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, at::TensorList, at::TensorList, bool, int64_t,
                                                           double, bool, bool, bool);
      std::tie(output, h, c) = torchs.typed<Signature>().call(part, {h, c}, weights, bias, 1, 0.0, false, false, false);
    } else {
      using Signature = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, at::TensorList, bool, int64_t, double,
                                                   bool, bool, bool);
      std::tie(output, h) = torchs.typed<Signature>().call(part, h, weights, bias, 1, 0.0, false, false, false);
    }
    return output;
  };
  results.output.reset();
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
  results.h_n.copy_(h);
  if (with_c) results.c_n.copy_(c);
}

// The gates that torch's kernel keeps to itself, from its output: two matrix products over all steps and a pointwise
// kernel; c, where the cell has it, is a diagonal scan over them.
void recover_gates(const ScanShape& shape, const Tensor& input, const Tensor& h0, const Tensor& c0, const Tensor& w_ih,
                   const Tensor& w_hh, const Tensor& b_ih, const Tensor& b_hh, const RnnResults& results) {
  const int64_t T = shape.T, B = shape.B, H = shape.H, later = (T - 1) * B;
  const bool apart = sides_apart(shape.cell), bias = b_ih.defined();
  const Tensor gates = results.gates.view({T * B, 4 * H}), output = results.output.view({T * B, H});
  // The rows of all steps but the first, and those of the states before them.
  const Tensor after = gates.narrow(0, shape.reverse ? 0 : B, later),
               first = gates.narrow(0, shape.reverse ? later : 0, B),
               before = output.narrow(0, shape.reverse ? B : 0, later), start = h0.squeeze(0);
  const int64_t rows_of_w = w_hh.size(0),
                summed = apart ? rows_of_w - H : rows_of_w;  // columns where both sides are added

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
  if (apart) {
    const Tensor w_n = w_hh.narrow(0, summed, H).t();
    Tensor m = after.narrow(1, rows_of_w, H), m_first = first.narrow(1, rows_of_w, H);
    if (bias) {
      const Tensor b_n = b_hh.narrow(0, summed, H);
      at::addmm_out(m, b_n, before, w_n);
      at::addmm_out(m_first, b_n, start, w_n);
    } else {
      at::mm_out(m, before, w_n);
      at::mm_out(m_first, start, w_n);
    }
  }

  const Tensor into_cells = !has_c(shape.cell) ? Tensor() : at::empty_like(results.cells);
  const auto stream = c10::cuda::getCurrentCUDAStream();
  if (gates.scalar_type() == at::kFloat) {
    scan_gates(shape, mutable_pointer<float>(gates), mutable_pointer<float>(into_cells), stream);
  } else {
    scan_gates(shape, mutable_pointer<double>(gates), mutable_pointer<double>(into_cells), stream);
  }
  if (has_c(shape.cell)) {
    // c[t] = f c[t-1] + i g
    const Tensor forget = results.gates.view({T, B, 4 * H}).narrow(2, H, H);
    scan::linear_scan_cuda({forget, into_cells, c0.squeeze(0), /*diagonal=*/true, shape.reverse, /*transpose=*/false},
                           results.cells);
  }
}

// rows w^T + bias, contiguous; bias may be undefined. Undefined of one column, whose products the walk makes itself.
Tensor project(const Tensor& rows, const Tensor& w, const Tensor& bias) {
  if (rows.size(1) == 1) return {};
  return bias.defined() ? at::addmm(bias, rows, w.t()) : at::mm(rows, w.t());
}

// Undefined statistics: nobody asks.
struct Chunked {
  TimeChunks chunks{1, 0};
  Tensor statistics;
};

template <typename scalar>
void forward_kernel(const ScanShape& shape, const Tensor& x, const Tensor& w_ih, const Tensor& b_ih, const Tensor& w_hh,
                    const Tensor& b_hh, const Tensor& h0, const Tensor& c0, const RnnResults& r, const Chunked& chunked,
                    int d) {
  const Tensor projected = project(x.view({shape.T * shape.B, x.size(2)}), w_ih, b_ih);
  const WarpForward<scalar> args{pointer<scalar>(projected),
                                 pointer<scalar>(x),
                                 pointer<scalar>(w_ih),
                                 pointer<scalar>(b_ih),
                                 pointer<scalar>(w_hh),
                                 pointer<scalar>(b_hh),
                                 pointer<scalar>(h0),
                                 pointer<scalar>(c0),
                                 mutable_pointer<scalar>(r.output),
                                 mutable_pointer<scalar>(r.h_n),
                                 mutable_pointer<scalar>(r.c_n),
                                 mutable_pointer<scalar>(r.gates),
                                 mutable_pointer<scalar>(r.cells)};
  const auto stream = c10::cuda::getCurrentCUDAStream();
  if (chunked.chunks.count == 1) return warp_forward(shape, args, stream);
  const Tensor messages =
      at::empty({newton_messages(shape, chunked.chunks, sizeof(scalar))}, x.options().dtype(at::kLong));
  C10_CUDA_CHECK(cudaMemsetAsync(messages.data_ptr(), 0, messages.nbytes(), stream));
  newton_forward(shape, args,
                 {chunked.chunks, static_cast<uint64_t*>(messages.data_ptr()),
                  chunked.statistics.defined() ? chunked.statistics.data_ptr<int64_t>() + 4 * d * shape.B : nullptr},
                 stream);
}

template <typename scalar>
void chain_kernel(const ScanShape& shape, const Tensor& grad_output, const Tensor& grad_h_n, const Tensor& grad_c_n,
                  const Tensor& w_hh, const Tensor& h0, const Tensor& c0, const Tensor& output, const Tensor& gates,
                  const Tensor& cells, const Tensor& dgates, const Tensor& grad_h0, const Tensor& grad_c0, int chunks,
                  const Tensor& workspace, const float* slice_maps) {
  const ScanChain<scalar> args{pointer<scalar>(grad_output),
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
  const auto stream = c10::cuda::getCurrentCUDAStream();
  if constexpr (std::is_same_v<scalar, float>) {
    if (slice_maps) return scan_slice_replay(shape, args, chunks, slice_maps, stream);
  }
  scan_chain(shape, args, chunks, stream);
}

// out (M,N) = left (R,M)^T right (R,N)
void transposed_product(Tensor out, const Tensor& left, const Tensor& right) {
  at::mm_out(out, left.t(), right);
}

// The operands of a direction: input, h0, c0, w_ih, w_hh, b_ih, b_hh. Which gradients are asked for, and the gradients.
using Mask = std::array<bool, 7>;
using Gradients = std::array<Tensor, 7>;

// The second stage of the backward pass: from the gradient before every nonlinearity to the gradients of input and
// parameters, matrix products over T*B rows in the dtype of input: those of the half types are the fast ones, and
// accumulate in float32.
//
// dgates (T,B,K*H) as chain_blocks describes it, accumulate type, contiguous. h0 (1,B,H), output (T,B,H) and the
// weights are as the layer was given them. Those of h0 and c0 are the first stage's.
Gradients gradients_by_products(const Tensor& dgates, const RnnArgs& args, const RnnSizes& s, int direction,
                                const RnnWeights& weights, const Tensor& h0, const Tensor& output, const Mask& mask) {
  const int64_t T = s.T, B = s.B, H = s.H, rows = s.G * H;
  const auto type = args.input.scalar_type();
  const bool apart = sides_apart(args.cell), reverse = direction == 1;
  const int64_t together = apart ? rows - H : rows;  // whose recurrent sides lie with the input sides in dgates
  Gradients grads;
  const bool products = mask[0] || mask[3] || mask[4];
  const Tensor d = products ? dgates.to(type) : dgates;  // (T, B, K*H)
  const Tensor d_in = mask[0] || mask[3] ? d.view({T * B, d.size(2)}).narrow(1, 0, rows) : Tensor();

  if (mask[0]) grads[0] = at::mm(d_in, weights.w_ih).view({T, B, s.I});
  if (mask[3]) {
    grads[3] = at::empty({rows, s.I}, args.input.options());
    transposed_product(grads[3], d_in, args.input.reshape({T * B, s.I}));
  }
  if (mask[4]) {
    // The state before each step is h0 and then the output shifted by one: two products instead of a shifted copy.
    const int64_t n = (T - 1) * B;
    const Tensor later = d.narrow(0, reverse ? 0 : 1, T - 1).reshape({n, d.size(2)});
    const Tensor before = output.narrow(0, reverse ? 1 : 0, T - 1).reshape({n, H});
    const Tensor first = d.select(0, reverse ? T - 1 : 0);  // (B, K*H)
    grads[4] = at::empty({rows, H}, args.input.options());
    auto part = [&](int64_t row, int64_t column, int64_t count) {
      Tensor out = grads[4].narrow(0, row, count);
      transposed_product(out, later.narrow(1, column, count), before);
      out.addmm_(first.narrow(1, column, count).t(), h0[0]);
    };
    part(0, 0, together);
    if (apart) part(together, rows, H);
  }
  if (mask[5] || mask[6]) {
    const Tensor sums = dgates.sum(at::IntArrayRef{0, 1});  // (K*H)
    // A fresh copy each: results of an op must not share memory.
    if (mask[5]) grads[5] = sums.narrow(0, 0, rows).to(type, /*non_blocking=*/false, /*copy=*/true);
    if (mask[6]) {
      grads[6] =
          apart ? at::cat({sums.narrow(0, 0, together), sums.narrow(0, rows, H)}).to(type) : sums.to(type, false, true);
    }
  }
  return grads;
}

}  // namespace

bool warp_holds(const RnnSizes& s) {
  return s.H > 0 && s.H <= kWarpHidden;
}

bool scan_has_kernels(const RnnArgs& args, const RnnSizes& s) {
  const bool wide = s.H <= scan_max_hidden(args.cell) && args.input.scalar_type() != at::kDouble;
  return s.heads == 1 && scan_max_hidden(args.cell) > 0 && !s.packed && s.R > 0 && s.I > 0 && s.T <= kMostSteps &&
         (warp_holds(s) || (s.H > 0 && wide));
}

RnnResults scan_forward(const RnnArgs& args, const RnnSizes& s, bool keep_cells, bool save) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto type = args.input.scalar_type(), compute = accumulate_type(type);
  const bool with_c = has_c(args.cell);
  // Gates and cells come together.
  RnnResults r = allocate_rnn(args, s, keep_cells, save || (with_c && keep_cells), compute, compute);
  const Tensor x = contiguous_in(args.input, compute);
  Chunked chunked;
  if (args.backward == Backward::kNewton && warp_holds(s)) {
    chunked.chunks = newton_chunks(shape_of(args, s, 0), compute == at::kFloat ? 4 : 8);
    chunked.statistics = newton_statistics(args, s, chunked.chunks.count);
  }
  // A launch that writes zeros is a tenth of what the host does for such a call.
  const bool from_zeros = chunked.chunks.count > 1 && !args.h0;
  const auto [h0, c0] = from_zeros ? std::pair<Tensor, Tensor>() : initial_state(args, s, compute);
  std::vector<Tensor> outputs, cells;  // of two directions
  for (int d = 0; d < s.D; ++d) {
    const RnnWeights w = rnn_weights(args, s, d);
    const Tensor w_ih = contiguous_in(w.w_ih, compute), w_hh = contiguous_in(w.w_hh, compute),
                 b_ih = contiguous_in(w.b_ih, compute), b_hh = contiguous_in(w.b_hh, compute),
                 h = direction_of(h0, s, d), c = direction_of(c0, s, d);
    const ScanShape shape = shape_of(args, s, d);
    RnnResults own = r;
    if (s.D > 1) {
      const auto one = [&](const Tensor& t) { return t.dim() == 3 ? at::empty({s.T, s.B, s.H}, t.options()) : t; };
      own = {one(r.output), direction_of(r.h_n, s, d), direction_of(r.c_n, s, d), one(r.cells),
             direction_of(r.gates, s, d)};
    }
    if (warp_holds(s)) {
      // The kernels keep fp32's digits, and so do the matrix products around them.
      const at::NoTF32Guard no_tf32;
      RnnResults walked = own;
      // Whether chunks meet depends on c, too.
      if (with_c && chunked.chunks.count > 1 && own.cells.dim() != 3) {
        walked.cells = at::empty({s.T, s.B, s.H}, x.options());
      }
      (compute == at::kFloat ? forward_kernel<float> : forward_kernel<double>)(shape, x, w_ih, b_ih, w_hh, b_hh, h, c,
                                                                               walked, chunked, d);
    } else {
      if (s.D == 1) r.output.reset();  // torch allocates its own
      forward_by_torch(args.cell, shape.reverse, x, h, c, w_ih, w_hh, b_ih, b_hh, own);
      if (own.gates.dim() == 3) {
        const at::NoTF32Guard no_tf32;
        recover_gates(shape, x, h, c, w_ih, w_hh, b_ih, b_hh, own);
      }
    }
    outputs.push_back(own.output);
    cells.push_back(own.cells);
  }
  if (s.D == 1) {
    r.output = outputs[0];
  } else {
    at::cat_out(r.output, outputs, 2);
    if (r.cells.dim() == 3) at::cat_out(r.cells, cells, 2);
  }
  r.output = contiguous_in(r.output, type);
  r.h_n = contiguous_in(r.h_n, type);
  r.c_n = contiguous_in(r.c_n, type);
  if (!save && r.gates.dim() == 3) r.gates = at::empty({0}, r.gates.options());
  return r;
}

void scan_recover_gates(const RnnArgs& args, const RnnSizes& s, const RnnResults& results) {
  const auto compute = accumulate_type(args.input.scalar_type());
  const RnnWeights w = rnn_weights(args, s, 0);
  const auto [h0, c0] = initial_state(args, s, compute);
  const at::NoTF32Guard no_tf32;
  recover_gates(shape_of(args, s, 0), args.input.contiguous(), h0, c0, w.w_ih.contiguous(), w.w_hh.contiguous(),
                contiguous_in(w.b_ih, compute), contiguous_in(w.b_hh, compute), results);
}

std::vector<Tensor> scan_backward(const RnnGrads& given, const RnnArgs& args, const RnnSizes& s, const Tensor& output,
                                  const Tensor& cells, const Tensor& gates, const c10::List<bool>& output_mask) {
  return scan_slice_backward(given, args, s, output, cells, gates, output_mask, Tensor(), 0);
}

void make_scan_slice_maps(const RnnGrads& given, const RnnArgs& args, const RnnSizes& s, const Tensor& output,
                          const Tensor& cells, const Tensor& gates, int chunks, const Tensor& maps, const Tensor& value,
                          const Tensor& message) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto [h0, c0] = initial_state(args, s, at::kFloat);
  const Tensor w_hh = rnn_weights(args, s, 0).w_hh.contiguous(), saved_output = output.contiguous(),
               saved_gates = gates.contiguous(), saved_cells = cells.contiguous(),
               arriving = contiguous_in(or_undefined(given.output), at::kFloat);
  const ScanChain<float> chain{pointer<float>(arriving),
                               nullptr,
                               nullptr,
                               pointer<float>(w_hh),
                               pointer<float>(h0),
                               pointer<float>(c0),
                               pointer<float>(saved_output),
                               pointer<float>(saved_gates),
                               pointer<float>(saved_cells),
                               nullptr,
                               nullptr,
                               nullptr,
                               nullptr};
  const int64_t states = value.size(1);
  const scan::SliceMaps told{mutable_pointer<float>(maps), mutable_pointer<float>(value),
                             message.mutable_data_ptr<int32_t>(), s.B, s.B * states * states};
  Tensor workspace;
  const auto allocate = [&](size_t bytes) {
    workspace = at::empty({int64_t(bytes)}, value.options().dtype(at::kByte));
    return workspace.data_ptr();
  };
  scan_slice_maps(shape_of(args, s, 0), chain, chunks, told, allocate, c10::cuda::getCurrentCUDAStream());
}

std::vector<Tensor> scan_slice_backward(const RnnGrads& given, const RnnArgs& args, const RnnSizes& s,
                                        const Tensor& output, const Tensor& cells, const Tensor& gates,
                                        const c10::List<bool>& output_mask, const Tensor& maps, int slice_chunks) {
  const bool of_slice = maps.defined();
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  // The kernels keep fp32's digits, and so do the matrix products around them.
  const at::NoTF32Guard no_tf32;
  const auto type = args.input.scalar_type(), compute = accumulate_type(type);
  const bool with_c = has_c(args.cell), bias = s.bias;
  const auto options = args.input.options().dtype(compute);
  const auto [h0, c0] = initial_state(args, s, compute);
  const Tensor saved_gates = gates.contiguous(), arriving_h = contiguous_in(given.h_n, compute),
               arriving_c = contiguous_in(given.c_n, compute), grad_h0 = at::empty({s.D, s.B, s.H}, options),
               grad_c0 = with_c ? at::empty({s.D, s.B, s.H}, options) : Tensor();
  std::vector<Tensor> result(output_mask.size());
  for (int d = 0; d < s.D; ++d) {
    const size_t first = size_t(rnn_first_weight(s, d));
    const Mask mask = {output_mask[0],
                       output_mask[1],
                       output_mask[2],
                       output_mask[first],
                       output_mask[first + 1],
                       bias && output_mask[first + 2],
                       bias && output_mask[first + 3]};
    const RnnWeights weights = rnn_weights(args, s, d);
    const ScanShape shape = shape_of(args, s, d);
    const Tensor state = direction_of(h0, s, d), w = contiguous_in(weights.w_hh, compute),
                 own_output = columns_of(output, s, d), saved_output = contiguous_in(own_output, compute),
                 saved_cells = columns_of(cells, s, d).contiguous(),
                 arriving = contiguous_in(columns_of(or_undefined(given.output), s, d), compute);
    // What the kernels make of dgates. The rest are GEMMs.
    const bool small = warp_holds(s) && compute == at::kFloat, narrow = s.I <= kMaxFusedInputs;
    const bool input_here = small && narrow && mask[0], w_ih_here = small && narrow && mask[3],
               parameters_here = small && (w_ih_here || mask[4] || mask[5] || mask[6]);
    Mask by_gemm = mask;
    if (input_here) by_gemm[0] = false;
    if (w_ih_here) by_gemm[3] = false;
    if (small) by_gemm[4] = by_gemm[5] = by_gemm[6] = false;
    // One workspace: the gradients of the parameters start when the chain is through.
    const int chunks = of_slice ? slice_chunks : compute == at::kFloat ? scan_chunks(shape) : 1;
    const int inputs = static_cast<int>(narrow ? s.I : 0);
    const Tensor workspace =
        at::empty({std::max(of_slice ? scan_slice_starts(shape, chunks) : scan_chain_workspace(shape, chunks),
                            parameters_here ? scan_gradients_workspace(shape, w_ih_here ? inputs : 0) : 0)},
                  options.dtype(at::kByte));
    const Tensor dgates = at::empty({s.T, s.B, chain_blocks(args.cell) * s.H}, options);
    (compute == at::kFloat ? chain_kernel<float>
                           : chain_kernel<double>)(shape, arriving, direction_of(arriving_h, s, d),
                                                   direction_of(arriving_c, s, d), w, state, direction_of(c0, s, d),
                                                   saved_output, direction_of(saved_gates, s, d), saved_cells, dgates,
                                                   direction_of(grad_h0, s, d), direction_of(grad_c0, s, d), chunks,
                                                   workspace, of_slice ? pointer<float>(maps) : nullptr);

    const Tensor given_state =
        !by_gemm[4] || args.h0 ? direction_of(or_undefined(args.h0), s, d) : contiguous_in(state, type);
    Gradients grads = gradients_by_products(dgates, args, s, d, weights, given_state, own_output, by_gemm);
    if (input_here || parameters_here) {
      const int64_t rows = s.G * s.H;
      auto wanted = [&](bool asked, at::IntArrayRef sizes) { return asked ? at::empty(sizes, options) : Tensor(); };
      const Tensor x = w_ih_here ? contiguous_in(args.input, compute) : Tensor(),
                   w_in = input_here ? contiguous_in(weights.w_ih, compute) : Tensor();
      const Tensor d_input = wanted(input_here, {s.T, s.B, s.I}), d_w_ih = wanted(w_ih_here, {rows, s.I}),
                   d_w_hh = wanted(mask[4], {rows, s.H}), d_b_ih = wanted(mask[5], {rows}),
                   d_b_hh = wanted(mask[6], {rows});
      const ScanGradients<float> kernel{inputs,
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
      scan_gradients(shape, kernel, c10::cuda::getCurrentCUDAStream());
      auto put = [&](Tensor& grad, const Tensor& found) {
        if (found.defined()) grad = contiguous_in(found, type);
      };
      put(grads[0], d_input);
      put(grads[3], d_w_ih);
      put(grads[4], d_w_hh);
      put(grads[5], d_b_ih);
      put(grads[6], d_b_hh);
    }
    if (mask[0]) result[0] = d == 0 ? grads[0] : result[0].add_(grads[0]);
    for (size_t i = 0; i < (bias ? 4 : 2); ++i) result[first + i] = grads[3 + i];
  }
  if (output_mask[1] && args.h0) result[1] = contiguous_in(grad_h0, type);
  if (output_mask[2] && args.c0) result[2] = contiguous_in(grad_c0, type);
  // An op's results are tensors; empty ones are only made for those that are missing, each costs two microseconds.
  for (Tensor& t : result) {
    if (!t.defined()) t = at::empty({0}, args.input.options());
  }
  return result;
}

int64_t rnn_slice_floats(const std::string& cell, int64_t hidden) {
  return scan_slice_floats(parse_cell("weft::rnn", c10::string_view(cell.data(), cell.size())), hidden);
}

namespace {

ScanShape sequence(const std::string& cell, int hidden, int64_t steps, int64_t batch) {
  return {parse_cell("weft::rnn", c10::string_view(cell.data(), cell.size())), steps, batch, hidden, /*reverse=*/false};
}

}  // namespace

scan::Expected rnn_scan_expected(int device, const std::string& cell, int hidden, int64_t steps, int64_t batch) {
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  const ScanShape shape = sequence(cell, hidden, steps, batch);
  const int chunks = scan_chunks(shape);
  return {chunks, scan_stages(shape, chunks)};
}

int rnn_slice_chunks(int device, const std::string& cell, int hidden, int64_t steps, int64_t batch) {
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  return scan_slice_chunks(sequence(cell, hidden, steps, batch));
}

}  // namespace weft::rnn
