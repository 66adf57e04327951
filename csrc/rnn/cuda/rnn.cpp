// weft::rnn on CUDA: the choice of the kernels, and the persistent ones: the products over all steps by cuBLAS, the
// recurrence in one kernel.
#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "common/autograd.h"
#include "common/cuda/captured.h"
#include "common/cuda/device_costs.h"
#include "common/cuda/tf32.h"
#include "rnn/newton/chunks.h"
#include "rnn/newton/cuda/newton_kernels.h"
#include "rnn/newton/forced.h"
#include "rnn/newton/report.h"
#include "rnn/persistent/cuda/multiply.h"
#include "rnn/persistent/cuda/products_us.h"
#include "rnn/persistent/cuda/recurrence.h"
#include "rnn/report.h"
#include "rnn/rnn.h"
#include "rnn/rnn_reference.h"
#include "rnn/scan/cuda/scan.h"

namespace weft::rnn {
namespace {

using at::Tensor;

// Far above what fits on any chip; strides in elements fit in an int.
constexpr int64_t kMaxHidden = 16384;
// Steps, and sequences in both directions, are counted in an int.
constexpr int64_t kMaxRows = std::numeric_limits<int>::max() / 4;

std::optional<RecurrenceType> type_of(at::ScalarType type) {
  if (type == at::kHalf) return RecurrenceType::kHalf;
  if (type == at::kBFloat16) return RecurrenceType::kBFloat16;
  if (type == at::kFloat) return takes_tf32(at::Float32Op::RNN) ? RecurrenceType::kTF32 : RecurrenceType::kFloat;
  return std::nullopt;
}

const void* data_of(const OptionalTensor& t) {
  return t && t->defined() && t->numel() > 0 ? t->const_data_ptr() : nullptr;
}
void* mutable_data_of(const Tensor& t) {
  return t.defined() && t.numel() > 0 ? t.mutable_data_ptr() : nullptr;
}

Tensor pinned(int64_t count, at::ScalarType type) {
  return at::empty({count}, at::TensorOptions().dtype(type).pinned_memory(true));
}

// Integers on the device. From pinned memory the copy needs no synchronisation.
Tensor to_device(const Tensor& host, at::Device device) {
  keep_while_captured(host, c10::cuda::getCurrentCUDAStream());
  return host.to(at::TensorOptions().device(device), /*non_blocking=*/true);
}

// The rows of a packed batch on the device.
struct PackedRows {
  Tensor lengths, offsets;  // (B) int, (T) long
};
PackedRows packed_rows(const RnnSteps& steps, const RnnSizes& s, at::Device device) {
  const Tensor lengths = pinned(s.B, at::kInt), offsets = pinned(s.T, at::kLong);
  std::copy(steps.lengths.begin(), steps.lengths.end(), lengths.mutable_data_ptr<int>());
  std::copy_n(steps.offsets.begin(), s.T, offsets.mutable_data_ptr<int64_t>());
  return {to_device(lengths, device), to_device(offsets, device)};
}

// What a call multiplies in, and the kernel of its recurrence; null where the reference has to run.
struct Way {
  RecurrenceType type{};
  const RecurrenceKernel* recurrence = nullptr;
};
Way way_of(const RnnArgs& args, const RnnSizes& s, bool backward) {
  const auto type = type_of(args.input.scalar_type());
  if (!type || s.R == 0 || s.H == 0 || s.I == 0 || s.H > kMaxHidden) return {};
  if (s.T > kMaxRows || s.B > kMaxRows) return {};
  const RecurrenceKernel& recurrence = recurrence_kernel({args.cell, *type, backward, s.packed, static_cast<int>(s.P),
                                                          static_cast<int>(s.heads), s.D, static_cast<int>(s.B)});
  return {*type, recurrence.geometry ? &recurrence : nullptr};
}

// The arguments that forward and backward share, and what keeps their memory alive.
struct Launch {
  RecurrenceArgs args{};
  Cell cell;
  std::vector<Tensor> alive;

  const void* keep(const OptionalTensor& t) {
    if (!t || !t->defined()) return nullptr;
    alive.push_back(t->contiguous());
    return data_of(alive.back());
  }

  Launch(const RnnArgs& a, const RnnSizes& s) : cell(a.cell) {
    for (int d = 0; d < s.D; ++d) {
      const RnnWeights w = rnn_weights(a, s, d);
      args.w_hh[d] = keep(w.w_hh);
      args.b_ih[d] = keep(w.b_ih);
      args.b_hh[d] = keep(w.b_hh);
    }
    args.h0 = keep(a.h0);
    args.c0 = keep(a.c0);
    args.output_stride = static_cast<int>(s.D * s.H);
    args.steps = static_cast<int>(s.T);
    args.batch = static_cast<int>(s.B);
    args.directions = s.D;
  }

  void set_packed(const PackedRows& rows) {
    alive.push_back(rows.lengths);
    alive.push_back(rows.offsets);
    args.lengths = rows.lengths.const_data_ptr<int>();
    args.offsets = rows.offsets.const_data_ptr<int64_t>();
  }

  // The tensor through which the blocks of a grid exchange: `result` itself where its rows are aligned to 16 bytes,
  // else one with padded rows, of each head. Filled with ones bits.
  void set_exchange(const Tensor& result, int64_t stride, int64_t direction, int values, bool backward,
                    const RnnSizes& s) {
    const int per_chunk = 16 / int(result.element_size());
    const int64_t padded_head = (s.P + per_chunk - 1) / per_chunk * per_chunk, padded = s.heads * padded_head;
    Tensor tensor = result;
    args.exchange_stride = static_cast<int>(stride);
    args.exchange_direction = direction;
    for (int v = 0; v < values; ++v) args.exchange_value[v] = int((backward ? recurrent_block(cell, v) : v) * s.H);
    args.publishes_result = padded == s.H && stride % per_chunk == 0;
    if (!args.publishes_result) {
      tensor = at::empty({s.D, s.R, values * padded}, result.options());
      alive.push_back(tensor);
      args.exchange_stride = static_cast<int>(values * padded);
      args.exchange_direction = s.R * values * padded;
      for (int v = 0; v < values; ++v) args.exchange_value[v] = int(v * padded);
    }
    args.exchange = tensor.mutable_data_ptr();
    C10_CUDA_CHECK(
        cudaMemsetAsync(args.exchange, 0xff, tensor.nbytes(), c10::cuda::getCurrentCUDAStream(tensor.get_device())));
  }
};

// The forward pass by the recurrence kernel, or the reference where it has none.
RnnResults persistent_forward(const Way& way, const RnnArgs& args, const RnnSizes& s, bool keep_cells, bool save) {
  const auto [type, recurrence] = way;
  if (!recurrence) return rnn_reference(args, s, keep_cells, save);
  const Tensor& input = args.input;
  const RnnResults r = allocate_rnn(args, s, keep_cells, save, input.scalar_type(), input.scalar_type());
  Launch launch(args, s);
  const bool keeps_gates = r.gates.numel() > 0;
  const int64_t columns = s.G * s.H, stride = keeps_gates ? 4 * s.H : columns;
  const Tensor x = keeps_gates ? r.gates : at::empty({s.D, s.R, columns}, input.options());
  const Tensor rows = input.contiguous();
  for (int d = 0; d < s.D; ++d) {
    const Tensor w_ih = rnn_weights(args, s, d).w_ih.contiguous();
    launch.alive.push_back(w_ih);
    char* const out = static_cast<char*>(x.mutable_data_ptr()) + d * s.R * stride * x.element_size();
    multiply(type, s.R, columns, s.I, {rows.const_data_ptr(), s.I}, {w_ih.const_data_ptr(), s.I, true}, out, stride,
             false);
  }
  RecurrenceArgs& a = launch.args;
  a.x = x.mutable_data_ptr();
  a.x_stride = static_cast<int>(stride);
  a.x_direction = s.R * stride;
  a.output = r.output.mutable_data_ptr();
  a.cells = mutable_data_of(r.cells);
  a.h_n = r.h_n.mutable_data_ptr();
  a.c_n = mutable_data_of(r.c_n);
  a.save = keeps_gates;
  if (s.packed) launch.set_packed(packed_rows(rnn_steps(args, s), s, input.device()));
  if (recurrence->geometry->tier == Tier::kGrid) launch.set_exchange(r.output, s.D * s.H, s.H, 1, false, s);
  launch_recurrence(*recurrence, a, c10::cuda::getCurrentCUDAStream());
  return r;
}

// The hidden state before each step, (R, H), of packed input.
Tensor states_before(const RnnArgs& args, const RnnSizes& s, const RnnSteps& steps, const Tensor& output,
                     const Tensor& h0, int d) {
  const Tensor index = pinned(s.R, at::kLong);
  int64_t* const from = index.mutable_data_ptr<int64_t>();
  for_each_row(s, steps, d, [&](int64_t row, int64_t before, int64_t b) { from[row] = before < 0 ? s.R + b : before; });
  const Tensor states = at::cat({output.narrow(1, d * s.H, s.H), h0}, 0);
  return at::index_select(states, 0, to_device(index, output.device()));
}

// The backward pass, likewise.
std::vector<Tensor> persistent_backward(const RnnGrads& grads, const RnnArgs& args, const RnnSizes& s,
                                        const Tensor& output, const Tensor& cells, const Tensor& gates,
                                        const c10::List<bool>& output_mask) {
  const auto [type, recurrence] = way_of(args, s, /*backward=*/true);
  if (!recurrence) return rnn_backward_reference(grads, args, s, output_mask);
  const Tensor& input = args.input;
  const OptionalTensor &h0 = args.h0, &c0 = args.c0;
  // A backward called inside an autocast region must not round its sums to half types.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto options = input.options();
  const int64_t bytes = input.element_size(), H = s.H;
  const auto none = [&] { return at::empty({0}, options); };

  std::vector<Tensor> result(output_mask.size());
  if (output_mask[1] && h0) result[1] = at::empty({s.D, s.B, H}, options);
  if (output_mask[2] && c0) result[2] = at::empty({s.D, s.B, s.S * H}, options);
  Launch launch(args, s);
  const int64_t blocks = chain_blocks(args.cell), stride = blocks * H;
  const Tensor dgates = at::empty({s.D, s.R, stride}, options);
  RecurrenceArgs& a = launch.args;
  a.x = const_cast<void*>(launch.keep(gates));
  a.x_stride = static_cast<int>(4 * H);
  a.x_direction = s.R * 4 * H;
  const Tensor states = output.contiguous();
  a.output = const_cast<void*>(states.const_data_ptr());
  a.cells = const_cast<void*>(launch.keep(cells));
  a.h_n = mutable_data_of(result[1]);
  a.c_n = mutable_data_of(result[2]);
  a.grad_output = launch.keep(grads.output);
  a.grad_cells = launch.keep(grads.cells);
  a.grad_h_n = launch.keep(grads.h_n);
  a.grad_c_n = launch.keep(grads.c_n);
  a.dgates = dgates.mutable_data_ptr();
  a.dgates_stride = static_cast<int>(stride);
  a.dgates_direction = s.R * stride;
  std::optional<RnnSteps> steps;
  if (s.packed) {
    steps = rnn_steps(args, s);
    launch.set_packed(packed_rows(*steps, s, input.device()));
  }
  if (recurrence->geometry->tier == Tier::kGrid) {
    launch.set_exchange(dgates, stride, s.R * stride, s.G, /*backward=*/true, s);
  }
  launch_recurrence(*recurrence, a, c10::cuda::getCurrentCUDAStream());

  const Tensor rows = input.contiguous();
  const int64_t columns = s.G * H;
  // Where a gate's sides stay apart, its recurrent side is the last block of dgates, else all are side by side.
  const bool apart = sides_apart(args.cell);
  const int64_t together = apart ? columns - H : columns;
  if (output_mask[0]) result[0] = at::empty(input.sizes(), options);
  for (int d = 0; d < s.D; ++d) {
    const RnnWeights w = rnn_weights(args, s, d);
    const size_t first = rnn_first_weight(s, d);
    const char* const dg = static_cast<const char*>(dgates.const_data_ptr()) + d * s.R * stride * bytes;
    if (output_mask[0]) {
      const Tensor w_ih = w.w_ih.contiguous();
      multiply(type, s.R, s.I, columns, {dg, stride}, {w_ih.const_data_ptr(), s.I}, result[0].mutable_data_ptr(), s.I,
               d > 0);
    }
    if (output_mask[first]) {
      result[first] = at::empty({columns, s.I}, options);
      multiply(type, columns, s.I, s.R, {dg, stride, true}, {rows.const_data_ptr(), s.I},
               result[first].mutable_data_ptr(), s.I, false);
    }
    if (output_mask[first + 1]) {
      Tensor& out = result[first + 1];
      out = at::empty({columns, s.P}, options);
      const char* const initial = h0 ? static_cast<const char*>(a.h0) + d * s.B * H * bytes : nullptr;
      // Rows [row, row + count) of the gradient, from columns [column, column + count) of dgates.
      const auto part = [&](int64_t row, int64_t column, int64_t count, const auto& term) {
        char* const to = static_cast<char*>(out.mutable_data_ptr()) + row * s.P * bytes;
        term(dg + column * bytes, count, to);
      };
      // Of several heads those of a gate at a time, the states' columns being the head's.
      const auto all_parts = [&](const auto& term) {
        if (s.heads > 1) {
          for (int g = 0; g < s.G; ++g) part(g * H, recurrent_block(args.cell, g) * H, s.P, term);
          return;
        }
        part(0, 0, together, term);
        if (apart) part(together, columns, H, term);
      };
      const Heads heads{s.heads, s.P, s.P, s.P * s.P};
      if (s.packed) {
        const Tensor zero = h0 ? Tensor() : at::zeros({s.B, H}, options);
        const Tensor before = states_before(args, s, *steps, states, h0 ? h0->select(0, d) : zero, d);
        all_parts([&](const char* left, int64_t count, char* to) {
          multiply(type, count, s.P, s.R, {left, stride, true}, {before.const_data_ptr(), H}, to, s.P, false, heads);
        });
      } else {
        // The state before each step is h0 and then the output shifted by one: two products instead of a copy.
        const int64_t later = (s.T - 1) * s.B;
        const char* const y = static_cast<const char*>(states.const_data_ptr()) + d * H * bytes;
        all_parts([&](const char* left, int64_t count, char* to) {
          multiply(type, count, s.P, later, {left + (d == 0 ? s.B * stride * bytes : 0), stride, true},
                   {y + (d == 0 ? 0 : s.B * s.D * H * bytes), s.D * H}, to, s.P, false, heads);
          if (initial) {
            multiply(type, count, s.P, s.B, {left + (d == 0 ? 0 : later * stride * bytes), stride, true}, {initial, H},
                     to, s.P, true, heads);
          }
        });
      }
    }
    if (s.bias && (output_mask[first + 2] || output_mask[first + 3])) {
      const Tensor sums = dgates.select(0, d).sum(at::IntArrayRef{0}, false, at::kFloat);
      if (output_mask[first + 2]) result[first + 2] = sums.narrow(0, 0, columns).to(options.dtype(), false, true);
      if (output_mask[first + 3]) {
        result[first + 3] = (apart ? at::cat({sums.narrow(0, 0, together), sums.narrow(0, columns, H)}) : sums)
                                .to(options.dtype(), false, true);
      }
    }
  }
  for (Tensor& t : result) {
    if (!t.defined()) t = none();
  }
  return result;
}

// A tensor that is as it should be does not go through the dispatcher.
Tensor in_type(const Tensor& t, at::ScalarType type) {
  return t.scalar_type() == type ? t : t.to(type);
}
OptionalTensor in_type(const OptionalTensor& t, at::ScalarType type) {
  return t ? OptionalTensor(in_type(*t, type)) : t;
}

// What "scan" runs where the scan has no kernel: all operands in the accumulate type.
struct Widened {
  Tensor input;
  OptionalTensor h0, c0;
  std::vector<Tensor> weights;
  RnnArgs args;

  Widened(const RnnArgs& a, at::ScalarType type)
      : input(in_type(a.input, type)),
        h0(in_type(a.h0, type)),
        c0(in_type(a.c0, type)),
        weights(all(a.weights, type)),
        args{input, h0, c0, weights, a.batch_sizes, a.cell, a.bidirectional, a.backward, a.heads} {}
  Widened(const Widened&) = delete;

  static std::vector<Tensor> all(at::TensorList list, at::ScalarType type) {
    std::vector<Tensor> result;
    for (const Tensor& t : list) result.push_back(in_type(t, type));
    return result;
  }
};

// How backward="newton" cuts a problem above what a warp holds: its chunks are rows of the persistent kernel's batch,
// where that runs more of them beside each other in about the time of a step. Two rounds walk all steps of a chunk; a
// net that remembers longer takes more of them, up to one for each chunk.
constexpr int64_t kMostRowChunks = 32, kShortestRows = 128;
// The share of the chain that two rounds may take.
constexpr double kWorthRows = 0.7;

TimeChunks row_chunks(const RecurrenceProblem& problem, int64_t T) {
  const TimeChunks whole{1, T};
  if (problem.packed || problem.directions > 1 || problem.backward || T >= kMaxRows) return whole;
  const auto step_us = [&](int64_t chunks) {
    RecurrenceProblem rows = problem;
    if (problem.batch > kMaxRows / chunks) return 0.0;
    rows.batch = static_cast<int>(problem.batch * chunks);
    const auto found = recurrence_geometries(rows);
    // Through L2 every row is published once, which leaves no second round.
    return found.empty() || found.front().tier == Tier::kGrid ? 0.0 : found.front().step_us;
  };
  if (const auto forced = forced_chunks()) return step_us(*forced) > 0 ? cut_time(T, *forced) : whole;
  const double chain = step_us(1) * double(T);
  TimeChunks best = whole;
  double least_us = kWorthRows * chain;
  for (int64_t count = 2; count <= kMostRowChunks && T / count >= kShortestRows; count *= 2) {
    const TimeChunks chunks = cut_time(T, count);
    const double each = step_us(chunks.count), us = 2 * each * double(chunks.length);
    if (each > 0 && us < least_us) best = chunks, least_us = us;
  }
  return best;
}

// The same, found once.
TimeChunks row_chunks_cached(const RecurrenceProblem& problem, int64_t T) {
  struct Known {
    int device;
    RecurrenceProblem problem;
    int64_t T;
    TimeChunks chunks;
  };
  if (forced_chunks()) return row_chunks(problem, T);
  static thread_local std::vector<Known> known;
  const int device = c10::cuda::current_device();
  for (const Known& k : known) {
    if (k.device == device && k.T == T && k.problem == problem) return k.chunks;
  }
  if (known.size() > 64) known.clear();
  return known.emplace_back(Known{device, problem, T, row_chunks(problem, T)}).chunks;
}

// The forward pass in chunks that are rows of a batch: float32, one direction. Gates are recovered from the output, as
// the kernel leaves them where a second round looks for its input.
RnnResults newton_rows(const RnnArgs& args, const RnnSizes& s, const TimeChunks& chunks, RecurrenceType type,
                       const RecurrenceKernel& recurrence, bool keep_cells, bool save) {
  const int64_t K = chunks.count, L = chunks.length, B = s.B, H = s.H;
  const bool with_c = has_c(args.cell), saves = save && has_gates(args.cell);
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const auto options = args.input.options();
  const Tensor statistics = newton_statistics(args, s, K);
  Tensor steps = args.input;
  if (K * L > s.T) steps = at::cat({steps, at::zeros({K * L - s.T, B, s.I}, options)});
  const Tensor rows = steps.contiguous().view({K, L, B, s.I}).transpose(0, 1).contiguous().view({L, K * B, s.I});
  const auto starts = [&](const OptionalTensor& first) {
    Tensor t = at::zeros({1, K * B, H}, options);
    if (first) t.narrow(1, 0, B).copy_(*first);
    return t;
  };
  const OptionalTensor h = starts(args.h0), c = with_c ? OptionalTensor(starts(args.c0)) : std::nullopt, none;
  const RnnArgs row_args{rows, h, c, args.weights, none, args.cell, false, args.backward};
  RnnSizes sizes = s;
  sizes.T = L, sizes.B = K * B, sizes.R = L * K * B;
  const RnnResults r = allocate_rnn(row_args, sizes, /*keep_cells=*/with_c, /*save=*/false, at::kFloat, at::kFloat);

  Launch launch(row_args, sizes);
  const int64_t columns = s.G * H;
  const Tensor x = at::empty({sizes.R, columns}, options), w_ih = rnn_weights(args, s, 0).w_ih.contiguous();
  multiply(type, sizes.R, columns, s.I, {rows.const_data_ptr(), s.I}, {w_ih.const_data_ptr(), s.I, true},
           x.mutable_data_ptr(), columns, false);
  RecurrenceArgs& a = launch.args;
  a.x = x.mutable_data_ptr();
  a.x_stride = static_cast<int>(columns);
  a.x_direction = sizes.R * columns;
  a.output = r.output.mutable_data_ptr();
  a.cells = mutable_data_of(r.cells);
  a.h_n = r.h_n.mutable_data_ptr();
  a.c_n = mutable_data_of(r.c_n);
  const Tensor gates = at::zeros({K + 1}, options.dtype(at::kInt));
  int* const gate = gates.mutable_data_ptr<int>();
  const auto last_row = [&](const Tensor& t) {
    return t.numel() > 0 ? t.mutable_data_ptr<float>() + (L - 1) * K * B * H : nullptr;
  };
  for (int64_t round = 1; round <= K; ++round) {
    a.gate = round == 1 ? nullptr : gate + round;
    launch_recurrence(recurrence, a, stream);
    if (round == K) break;
    newton_seams({chunks, s.T, B, H, round, last_row(r.output), last_row(r.cells), h->mutable_data_ptr<float>(),
                  c ? c->mutable_data_ptr<float>() : nullptr, a.gate, gate + round + 1,
                  statistics.defined() ? statistics.mutable_data_ptr<int64_t>() : nullptr},
                 stream);
  }

  const auto in_time = [&](const Tensor& t) {
    return t.view({L, K, B, H}).transpose(0, 1).reshape({K * L, B, H}).narrow(0, 0, s.T).contiguous();
  };
  RnnResults found = allocate_rnn(args, s, keep_cells, save, at::kFloat, at::kFloat);
  found.output = in_time(r.output);
  found.h_n.copy_(found.output.narrow(0, s.T - 1, 1));
  if (with_c) {
    const Tensor cells = in_time(r.cells);
    found.c_n.copy_(cells.narrow(0, s.T - 1, 1));
    if (save || keep_cells) found.cells = cells;
  }
  if (saves) {
    RnnResults recovered = found;
    // The seams are between the walk's own cells.
    if (with_c) recovered.cells = at::empty_like(found.cells);
    scan_recover_gates(args, s, recovered);
  }
  return found;
}

// The forward pass for backward="scan": where both the persistent kernel and another can run it, the persistent one
// does, but for two cases. One warp is as fast where it holds the layer. And cuDNN's LSTM with the gates recovered
// takes a tenth less than the persistent kernel at the sizes that the scan holds beyond a warp, which no other cell's
// does; two directions, which the persistent kernel runs at the same time and cuDNN here one after the other, are left
// to it.
RnnResults forward_for_scan(const RnnArgs& args, const RnnSizes& s, bool keep_cells, bool save) {
  const bool cudnn = at::Context::hasCuDNN() && at::globalContext().userEnabledCuDNN();
  const bool by_cudnn = has_c(args.cell) && s.D == 1 && cudnn;
  const bool in_rows = args.backward == Backward::kNewton && !warp_holds(s) && s.D == 1 && !s.packed && s.heads == 1 &&
                       scan_max_hidden(args.cell) > 0;
  if (scan_has_kernels(args, s) && (warp_holds(s) || (by_cudnn && !in_rows)))
    return scan_forward(args, s, keep_cells, save);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto type = args.input.scalar_type();
  const Widened wide(args, accumulate_type(type));
  const Way way = way_of(wide.args, s, /*backward=*/false);
  if (in_rows && way.recurrence) {
    const RecurrenceProblem problem{args.cell,
                                    way.type,
                                    /*backward=*/false,
                                    /*packed=*/false,
                                    static_cast<int>(s.H),
                                    /*heads=*/1,
                                    s.D,
                                    static_cast<int>(s.B)};
    const TimeChunks chunks = row_chunks_cached(problem, s.T);
    RecurrenceProblem rows = problem;
    rows.batch = static_cast<int>(s.B * chunks.count);
    const RecurrenceKernel* const recurrence = chunks.count > 1 ? &recurrence_kernel(rows) : nullptr;
    if (recurrence && recurrence->geometry && recurrence->geometry->tier != Tier::kGrid) {
      RnnResults r = newton_rows(wide.args, s, chunks, way.type, *recurrence, keep_cells, save);
      for (Tensor* t : {&r.output, &r.h_n, &r.c_n}) *t = in_type(*t, type);
      return r;
    }
  }
  if (!way.recurrence && scan_has_kernels(args, s)) return scan_forward(args, s, keep_cells, save);
  RnnResults r = persistent_forward(way, wide.args, s, keep_cells, save);
  for (Tensor* t : {&r.output, &r.h_n, &r.c_n}) *t = in_type(*t, type);
  return r;
}

std::vector<Tensor> backward_by_scan(const RnnGrads& grads, const RnnArgs& args, const RnnSizes& s,
                                     const Tensor& output, const Tensor& cells, const Tensor& gates,
                                     const c10::List<bool>& output_mask) {
  if (scan_has_kernels(args, s) && !grads.cells) {
    return scan_backward(grads, args, s, output, cells, gates, output_mask);
  }
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto type = args.input.scalar_type(), compute = accumulate_type(type);
  const Widened wide(args, compute);
  const OptionalTensor grad_output = in_type(grads.output, compute), grad_h_n = in_type(grads.h_n, compute),
                       grad_c_n = in_type(grads.c_n, compute);
  auto result = persistent_backward({grad_output, grad_h_n, grad_c_n, grads.cells}, wide.args, s,
                                    in_type(output, compute), cells, gates, output_mask);
  for (Tensor& t : result) t = in_type(t, type);
  return result;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> rnn_cuda(const Tensor& input, const OptionalTensor& h0,
                                                            const OptionalTensor& c0, at::TensorList weights,
                                                            const OptionalTensor& batch_sizes,
                                                            c10::string_view cell_name, bool bidirectional,
                                                            bool keep_cells, bool save, c10::string_view backward_name,
                                                            int64_t heads) {
  const char* op = "weft::rnn";
  const RnnArgs args{
      input, h0, c0, weights, batch_sizes, parse_cell(op, cell_name), bidirectional, parse_backward(op, backward_name),
      heads};
  const RnnSizes s = check_rnn(op, args);
  const c10::cuda::CUDAGuard guard(input.device());
  if (args.backward != Backward::kPersistent) return forward_for_scan(args, s, keep_cells, save).tuple();
  return persistent_forward(way_of(args, s, /*backward=*/false), args, s, keep_cells, save).tuple();
}

std::vector<Tensor> rnn_backward_cuda(const OptionalTensor& grad_output, const OptionalTensor& grad_h_n,
                                      const OptionalTensor& grad_c_n, const OptionalTensor& grad_cells,
                                      const Tensor& input, const OptionalTensor& h0, const OptionalTensor& c0,
                                      at::TensorList weights, const OptionalTensor& batch_sizes, const Tensor& output,
                                      const Tensor& cells, const Tensor& gates, c10::string_view cell_name,
                                      bool bidirectional, c10::List<bool> output_mask, c10::string_view backward_name,
                                      int64_t heads) {
  const char* op = "weft::rnn_backward";
  const RnnArgs args{
      input, h0, c0, weights, batch_sizes, parse_cell(op, cell_name), bidirectional, parse_backward(op, backward_name),
      heads};
  const RnnGrads grads{grad_output, grad_h_n, grad_c_n, grad_cells};
  const RnnSizes s = check_rnn(op, args);
  const c10::cuda::CUDAGuard guard(input.device());
  check_rnn_saved(op, args, s, grads, output, cells, gates, output_mask);
  const auto run = args.backward == Backward::kPersistent ? persistent_backward : backward_by_scan;
  return run(grads, args, s, output, cells, gates, output_mask);
}

TORCH_LIBRARY_IMPL(weft, CUDA, m) {
  m.impl("rnn", &rnn_cuda);
  m.impl("rnn_backward", &rnn_backward_cuda);
}

std::optional<RecurrenceProblem> problem_of(const RnnCase& c, bool backward) {
  const auto type = type_of(c.dtype == "float16"    ? at::kHalf
                            : c.dtype == "bfloat16" ? at::kBFloat16
                            : c.dtype == "float32"  ? at::kFloat
                                                    : at::kDouble);
  if (!type || c.H > kMaxHidden || c.B > kMaxRows) return std::nullopt;
  return RecurrenceProblem{parse_cell("weft::rnn", c10::string_view(c.cell.data(), c.cell.size())),
                           *type,
                           backward,
                           c.packed,
                           static_cast<int>(c.H / c.heads),
                           c.heads,
                           c.directions,
                           static_cast<int>(std::max<int64_t>(1, c.B))};
}

}  // namespace

std::vector<RnnGeometry> rnn_geometries(int device, const RnnCase& c, bool backward) {
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  std::vector<RnnGeometry> result;
  const auto problem = problem_of(c, backward);
  if (!problem) return result;
  for (const RecurrenceGeometry& g : recurrence_geometries(*problem)) {
    const RecurrenceAmounts amounts = geometry_amounts(*problem, g);
    RnnGeometry& each = result.emplace_back(
        RnnGeometry{geometry_text(g), geometry_defines(*problem, g), g.step_us, amounts.launches, {}});
    for (int i = 0; i < kRecurrenceCosts; ++i) {
      each.amounts.emplace_back(recurrence_cost_names()[i], amounts.amounts[i]);
    }
  }
  return result;
}

TimeChunks rnn_row_chunks(int device, const RnnCase& c) {
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  const auto problem = problem_of(c, /*backward=*/false);
  return problem && c.T > 0 && c.H > kWarpHidden ? row_chunks_cached(*problem, c.T) : TimeChunks{1, c.T};
}

RnnReport rnn_report(int device, const RnnCase& c) {
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  RnnReport report;
  for (const bool backward : {false, true}) {
    if (backward && !c.trains) break;
    const auto problem = problem_of(c, backward);
    if (!problem) {
      // float64 runs step by step: right, and nothing to choose for its speed.
      if (c.dtype != "float64") report.why_not = "its weights do not fit on the chip";
      return report;
    }
    const RecurrenceKernel& recurrence = recurrence_kernel(*problem);
    if (!recurrence.geometry) {
      report.why_not = recurrence.why_not;
      continue;
    }
    const RecurrenceGeometry& g = *recurrence.geometry;
    (backward ? report.backward : report.forward) =
        RnnPass{tier_name(g.tier), g.fma ? "fma" : "mma", g.groups * c.directions, g.group, 32 * g.warps, g.columns,
                g.cluster,         g.directions};
    report.microseconds += g.step_us * double(std::max<int64_t>(1, c.T)) * c.layers;
    if (backward) continue;
    report.microseconds += products_us(*problem, c, device_costs(device).table("products"));
  }
  if (!report.why_not.empty()) report.microseconds = 0;
  return report;
}

}  // namespace weft::rnn
