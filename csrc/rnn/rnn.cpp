// weft::rnn: names, argument checks, allocation, the places of the steps in packed data.
#include "rnn/rnn.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cctype>
#include <string>
#include <utility>

#include "common/check.h"

namespace weft::rnn {
namespace {

constexpr std::pair<const char*, Backward> kBackwards[] = {
    {"persistent", Backward::kPersistent}, {"scan", Backward::kScan}, {"newton", Backward::kNewton}};

template <typename Value, size_t count>
Value parse(const char* op, const char* argument, const std::pair<const char*, Value> (&table)[count],
            c10::string_view name) {
  std::string known;
  for (const auto& [known_name, value] : table) {
    if (name == known_name) return value;
    known += (known.empty() ? "'" : ", '") + std::string(known_name) + "'";
  }
  TORCH_CHECK_VALUE(false, op, ": ", argument, " must be one of ", known, ", got '", name, "'");
}

constexpr const char* kWeightNames[2][4] = {
    {"w_ih", "w_hh", "b_ih", "b_hh"},
    {"w_ih of direction 1", "w_hh of direction 1", "b_ih of direction 1", "b_hh of direction 1"}};

// What w_hh is, for messages.
const char* recurrent_layout(int64_t heads) {
  return heads == 1 ? "(G*H, H)" : "(G*H, H / num_heads)";
}

// The number of sequences; torch's kernels refuse the same batch_sizes, with the same exception type.
int64_t check_batch_sizes(const char* op, const at::Tensor& batch_sizes, int64_t rows,
                          const std::optional<at::Tensor>& h0) {
  TORCH_CHECK(batch_sizes.dim() == 1 && batch_sizes.scalar_type() == at::kLong && batch_sizes.device().is_cpu(), op,
              ": batch_sizes must be (T), int64, on the CPU, got ", batch_sizes.sizes(), " ", batch_sizes.scalar_type(),
              " on ", batch_sizes.device());
  const auto sizes = batch_sizes.accessor<int64_t, 1>();
  int64_t sum = 0;
  for (int64_t t = 0; t < sizes.size(0); ++t) {
    TORCH_CHECK(sizes[t] >= 1, op, ": batch_sizes must be at least 1 at every step, got ", sizes[t], " at step ", t);
    TORCH_CHECK(t == 0 || sizes[t] <= sizes[t - 1], op, ": batch_sizes must not increase, got ", sizes[t], " at step ",
                t, " after ", sizes[t - 1]);
    sum += sizes[t];
  }
  TORCH_CHECK(sum == rows, op, ": batch_sizes must sum to the rows of the packed input, ", rows, ", got ", sum);
  if (sizes.size(0) > 0) return sizes[0];
  return h0 && h0->dim() == 3 ? h0->size(1) : 0;
}

}  // namespace

Cell parse_cell(const char* op, c10::string_view name) {
  std::string known;
  for (int i = 0; i < kCellCount; ++i) {
    if (name == kCells[i].name) return Cell(i);
    known += (known.empty() ? "'" : ", '") + std::string(kCells[i].name) + "'";
  }
  TORCH_CHECK_VALUE(false, op, ": cell must be one of ", known, ", got '", name, "'");
}

std::string cells_with_c() {
  std::string names;
  for (int i = 0; i < kCellCount; ++i) {
    if (has_c(Cell(i))) names += (names.empty() ? "" : ", ") + std::string(kCells[i].name);
  }
  return names;
}

std::string layer_of(Cell cell) {
  // rnn_tanh is a way of RNN, as slstm_exp is of SLSTM.
  std::string name = kCells[int(cell)].name;
  name = name.substr(0, name.find('_'));
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::toupper(c); });
  return "weft.nn." + name;
}

Backward parse_backward(const char* op, c10::string_view name) {
  return parse(op, "backward", kBackwards, name);
}

at::ScalarType accumulate_type(at::ScalarType type) {
  return type == at::kDouble ? at::kDouble : at::kFloat;
}

RnnSizes check_rnn(const char* op, const RnnArgs& args) {
  const auto& [input, h0, c0, weights, batch_sizes, cell, bidirectional, backward, heads] = args;
  const bool with_c = has_c(cell);
  RnnSizes s{};
  s.packed = batch_sizes.has_value();
  TORCH_CHECK_VALUE(input.dim() == (s.packed ? 2 : 3), op, ": input must be ",
                    s.packed ? "(N, I) with batch_sizes" : "(T, B, I)", ", got ", input.dim(),
                    " dimensions: ", input.sizes());
  check_floating(op, "input", input);
  s.I = input.size(-1);
  s.D = bidirectional ? 2 : 1;
  s.G = gate_blocks(cell);
  s.S = other_states(cell);
  s.K = kept_states(cell);
  s.heads = heads;
  TORCH_CHECK_VALUE(heads >= 1, op, ": num_heads must be at least 1, got ", heads);
  if (s.packed) {
    s.B = check_batch_sizes(op, *batch_sizes, input.size(0), h0);
    s.T = batch_sizes->size(0);
    s.R = input.size(0);
  } else {
    s.T = input.size(0);
    s.B = input.size(1);
    s.R = s.T * s.B;
  }

  const auto given = static_cast<int64_t>(weights.size());
  TORCH_CHECK_VALUE(given == 2 * s.D || given == 4 * s.D, op, ": weights must be w_ih, w_hh[, b_ih, b_hh] for each of ",
                    s.D, s.D == 1 ? " direction" : " directions", ", got ", given, " tensors");
  s.bias = given == 4 * s.D;
  TORCH_CHECK_VALUE(weights[1].dim() == 2, op, ": w_hh must be ", recurrent_layout(heads), ", got ", weights[1].dim(),
                    " dimensions: ", weights[1].sizes());
  s.P = weights[1].size(1);
  s.H = heads * s.P;
  const int64_t rows = s.G * s.H;
  for (int d = 0, index = 0; d < s.D; ++d) {
    const auto& names = kWeightNames[d];
    const auto check = [&](int which, at::IntArrayRef shape, const char* layout) {
      const at::Tensor& weight = weights[index++];
      check_shape(op, names[which], weight, shape, layout);
      check_like(op, names[which], weight, "input", input);
    };
    check(0, {rows, s.I}, "(G*H, I)");
    check(1, {rows, s.P}, recurrent_layout(heads));
    if (s.bias) {
      check(2, {rows}, "(G*H)");
      check(3, {rows}, "(G*H)");
    }
  }

  if (h0) {
    check_shape(op, "h0", *h0, {s.D, s.B, s.H}, "(D, B, H)");
    check_like(op, "h0", *h0, "input", input);
  }
  TORCH_CHECK_VALUE(with_c || !c0, op, ": c0 must be None except for ", cells_with_c(), ", got a tensor");
  TORCH_CHECK_VALUE(!with_c || c0.has_value() == h0.has_value(), op,
                    ": h0 and c0 must both be given or both be None, got ", c0 ? "only c0" : "only h0");
  if (c0) {
    check_shape(op, "c0", *c0, {s.D, s.B, s.S * s.H}, s.S == 1 ? "(D, B, H)" : "(D, B, S*H)");
    check_like(op, "c0", *c0, "input", input);
  }
  return s;
}

void check_rnn_saved(const char* op, const RnnArgs& args, const RnnSizes& s, const RnnGrads& grads,
                     const at::Tensor& output, const at::Tensor& cells, const at::Tensor& gates,
                     const c10::List<bool>& output_mask) {
  const bool with_c = has_c(args.cell);
  const auto check = [&](const char* name, const at::Tensor& t, at::IntArrayRef shape, const char* layout) {
    check_shape(op, name, t, shape, layout);
    check_like(op, name, t, "input", args.input);
  };
  // Of the dtype that activations are saved in.
  const auto check_saved = [&](const char* name, const at::Tensor& t, at::IntArrayRef shape, const char* layout) {
    const auto type = args.saved_type();
    if (type == args.input.scalar_type()) return check(name, t, shape, layout);
    check_shape(op, name, t, shape, layout);
    TORCH_CHECK_TYPE(t.scalar_type() == type, op, ": ", name, " must be ", type, " for ", args.input.scalar_type(),
                     " input and backward='scan' or 'newton', got ", t.scalar_type());
    TORCH_CHECK(t.device() == args.input.device(), op, ": ", name, " must be on the device of input, ",
                args.input.device(), ", got ", t.device());
  };
  // Of one state, or of all that are kept.
  const auto check_rows = [&](const auto& check, const char* name, const at::Tensor& t, int states = 1) {
    const int64_t columns = s.D * states * s.H;
    if (s.packed) {
      check(name, t, {s.R, columns}, states == 1 ? "(N, D*H)" : "(N, D*K*H)");
    } else {
      check(name, t, {s.T, s.B, columns}, states == 1 ? "(T, B, D*H)" : "(T, B, D*K*H)");
    }
  };
  if (grads.output) check_rows(check, "grad_output", *grads.output);
  if (grads.h_n) check("grad_h_n", *grads.h_n, {s.D, s.B, s.H}, "(D, B, H)");
  TORCH_CHECK_VALUE(with_c || !grads.c_n, op, ": grad_c_n must be None except for ", cells_with_c(), ", got a tensor");
  if (grads.c_n) {
    check("grad_c_n", *grads.c_n, {s.D, s.B, s.S * s.H}, s.S == 1 ? "(D, B, H)" : "(D, B, S*H)");
  }
  TORCH_CHECK_VALUE(with_c || !grads.cells, op, ": grad_cells must be None except for ", cells_with_c(),
                    ", got a tensor");
  if (grads.cells) check_rows(check_saved, "grad_cells", *grads.cells, s.K);
  check_rows(check, "output", output);
  if (with_c) check_rows(check_saved, "cells", cells, s.K);
  if (has_gates(args.cell)) {
    check_saved("gates", gates, {s.D, s.R, 4 * s.H}, "(D, R, 4H) as a forward with save=True returns it");
  }
  TORCH_CHECK_VALUE(output_mask.size() == 3 + args.weights.size(), op,
                    ": output_mask must have one entry for each of input, h0, c0 and the weights, ",
                    3 + args.weights.size(), ", got ", output_mask.size());
}

RnnWeights rnn_weights(const RnnArgs& args, const RnnSizes& s, int direction) {
  const at::Tensor* first = args.weights.data() + rnn_first_weight(s, direction) - 3;
  return {first[0], first[1], s.bias ? first[2] : at::Tensor(), s.bias ? first[3] : at::Tensor()};
}

RnnSteps rnn_steps(const RnnArgs& args, const RnnSizes& s) {
  RnnSteps steps{std::vector<int64_t>(s.T + 1, 0), std::vector<int64_t>(s.B, s.T)};
  if (!s.packed) {
    for (int64_t t = 0; t < s.T; ++t) steps.offsets[t + 1] = (t + 1) * s.B;
    return steps;
  }
  const auto sizes = args.batch_sizes->accessor<int64_t, 1>();
  int64_t running = s.B;
  for (int64_t t = 0; t < s.T; ++t) {
    while (running > sizes[t]) steps.lengths[--running] = t;
    steps.offsets[t + 1] = steps.offsets[t] + sizes[t];
  }
  return steps;
}

RnnResults allocate_rnn(const RnnArgs& args, const RnnSizes& s, bool keep_cells, bool save, at::ScalarType type,
                        at::ScalarType saved_type) {
  const auto options = args.input.options().dtype(type), saved = options.dtype(saved_type);
  const bool with_c = has_c(args.cell);
  const auto like_output = [&](const at::TensorOptions& options, int states) {
    const int64_t columns = s.D * states * s.H;
    return s.packed ? at::empty({s.R, columns}, options) : at::empty({s.T, s.B, columns}, options);
  };
  RnnResults r;
  r.output = like_output(options, 1);
  r.h_n = at::empty({s.D, s.B, s.H}, options);
  r.c_n = with_c ? at::empty({s.D, s.B, s.S * s.H}, options) : at::empty({0}, options);
  r.cells = with_c && (save || keep_cells) ? like_output(saved, s.K) : at::empty({0}, saved);
  r.gates = save && has_gates(args.cell) ? at::empty({s.D, s.R, 4 * s.H}, saved) : at::empty({0}, saved);
  return r;
}

}  // namespace weft::rnn
