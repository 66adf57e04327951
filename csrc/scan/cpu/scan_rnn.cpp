// weft::scan_rnn on the CPU: types, packing, threads over the batch. The arithmetic is in scan_rnn_kernels-inl.h.
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>

#include "scan/cpu/scan_rnn_kernels.h"
#include "scan/scan_rnn.h"

namespace weft {
namespace {

// The instruction set that torch itself uses (ATEN_CPU_CAPABILITY lowers it).
const cpu::ScanRnnTables& tables() {
#ifdef __x86_64__
  static const std::string capability = at::get_cpu_capability();
  if (capability == "AVX512") return cpu::scan_rnn_avx512();
  if (capability == "AVX2") return cpu::scan_rnn_avx2();
#endif
  return cpu::scan_rnn_baseline();
}

template <typename T>
const cpu::ScanRnnKernels<T>& kernels() {
  if constexpr (std::is_same_v<T, float>) {
    return tables().f32;
  } else {
    return tables().f64;
  }
}

at::Tensor compute_copy(const at::Tensor& t, at::ScalarType type) {
  return t.to(type).contiguous();
}

at::Tensor compute_copy(const std::optional<at::Tensor>& t, at::ScalarType type) {
  return t ? compute_copy(*t, type) : at::Tensor();
}

template <typename T>
const T* pointer(const at::Tensor& t) {
  return t.defined() ? t.const_data_ptr<T>() : nullptr;
}

// Rows per task, such that a task is worth waking a thread for.
int64_t grain(const ScanRnnSizes& s) {
  const int64_t work_per_row = s.T * s.gates * s.H * (s.H + s.I + 16);
  return work_per_row > 0 ? std::max<int64_t>(1, 200000 / work_per_row) : s.B + 1;
}

template <typename T>
void forward(Cell cell, bool reverse, const ScanRnnSizes& s, const at::Tensor& input, const at::Tensor& h0,
             const at::Tensor& c0, const at::Tensor& w_ih, const at::Tensor& w_hh, const at::Tensor& b_ih,
             const at::Tensor& b_hh, const ScanRnnResults& results) {
  const auto& k = kernels<T>();
  const auto options = input.options();
  auto scratch = [&](int64_t count) { return at::empty({count}, options); };

  const at::Tensor packed_ih = scratch(k.packed_size(s.gates, s.H, s.I));
  const at::Tensor packed_hh = scratch(k.packed_size(s.gates, s.H, s.H));
  k.pack_forward(cell, pointer<T>(w_ih), s.H, s.I, packed_ih.mutable_data_ptr<T>());
  k.pack_forward(cell, pointer<T>(w_hh), s.H, s.H, packed_hh.mutable_data_ptr<T>());

  const bool gru = cell == Cell::kGru;
  at::Tensor bias = b_ih;
  if (b_ih.defined()) {
    bias = b_ih.clone();
    const int64_t shared = gru ? 2 * s.H : bias.size(0);
    bias.narrow(0, 0, shared).add_(b_hh.narrow(0, 0, shared));
  }
  const at::Tensor padded = scratch(k.packed_size(s.gates, s.H, 1));
  const at::Tensor padded_m = scratch(gru ? k.packed_size(1, s.H, 1) : 0);
  k.pad_bias(s.gates, pointer<T>(bias), s.H, padded.mutable_data_ptr<T>());
  if (gru) {
    k.pad_bias(1, b_hh.defined() ? pointer<T>(b_hh) + 2 * s.H : nullptr, s.H, padded_m.mutable_data_ptr<T>());
  }

  const bool save = results.gates.dim() == 3;
  const cpu::ScanRnnForwardArgs<T> args{cell,
                                        reverse,
                                        s.T,
                                        s.B,
                                        s.I,
                                        s.H,
                                        pointer<T>(input),
                                        pointer<T>(h0),
                                        pointer<T>(c0),
                                        pointer<T>(packed_ih),
                                        pointer<T>(packed_hh),
                                        pointer<T>(padded),
                                        pointer<T>(padded_m),
                                        results.output.mutable_data_ptr<T>(),
                                        results.h_n.mutable_data_ptr<T>(),
                                        results.c_n.mutable_data_ptr<T>(),
                                        save ? results.gates.mutable_data_ptr<T>() : nullptr,
                                        save ? results.cells.mutable_data_ptr<T>() : nullptr};
  at::parallel_for(0, s.B, grain(s), [&](int64_t b0, int64_t b1) {
    const at::Tensor own = scratch(k.forward_scratch(args, b1 - b0));
    k.forward(args, b0, b1, own.mutable_data_ptr<T>());
  });
}

template <typename T>
void chain(Cell cell, bool reverse, const ScanRnnSizes& s, const at::Tensor& grad_output, const at::Tensor& grad_h_n,
           const at::Tensor& grad_c_n, const at::Tensor& h0, const at::Tensor& c0, const at::Tensor& w_hh,
           const at::Tensor& output, const at::Tensor& gates, const at::Tensor& cells, const at::Tensor& dgates,
           const at::Tensor& grad_h0, const at::Tensor& grad_c0) {
  const auto& k = kernels<T>();
  auto scratch = [&](int64_t count) { return at::empty({count}, dgates.options()); };
  const at::Tensor packed = scratch(k.packed_size(1, s.H, s.gates * s.H));
  k.pack_backward(pointer<T>(w_hh), s.H, s.gates * s.H, packed.mutable_data_ptr<T>());
  const cpu::ScanRnnBackwardArgs<T> args{cell,
                                         reverse,
                                         s.T,
                                         s.B,
                                         s.H,
                                         pointer<T>(grad_output),
                                         pointer<T>(grad_h_n),
                                         pointer<T>(grad_c_n),
                                         pointer<T>(h0),
                                         pointer<T>(c0),
                                         pointer<T>(output),
                                         pointer<T>(gates),
                                         pointer<T>(cells),
                                         pointer<T>(packed),
                                         dgates.mutable_data_ptr<T>(),
                                         grad_h0.mutable_data_ptr<T>(),
                                         grad_c0.mutable_data_ptr<T>()};
  at::parallel_for(0, s.B, grain(s), [&](int64_t b0, int64_t b1) {
    const at::Tensor own = scratch(k.backward_scratch(args, b1 - b0));
    k.backward(args, b0, b1, own.mutable_data_ptr<T>());
  });
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> scan_rnn_cpu(
    const at::Tensor& input, const at::Tensor& h0, const std::optional<at::Tensor>& c0, const at::Tensor& w_ih,
    const at::Tensor& w_hh, const std::optional<at::Tensor>& b_ih, const std::optional<at::Tensor>& b_hh,
    c10::string_view cell_name, bool reverse, bool save) {
  const char* op = "weft::scan_rnn";
  const Cell cell = parse_cell(op, cell_name);
  const auto s = check_scan_rnn(op, cell, input, h0, c0, w_ih, w_hh, b_ih, b_hh);
  const auto type = input.scalar_type(), compute = accumulate_type(type);
  const at::Tensor x = compute_copy(input, compute);
  ScanRnnResults results = allocate_scan_rnn(cell, s, x, save);
  const auto run = compute == at::kDouble ? forward<double> : forward<float>;
  run(cell, reverse, s, x, compute_copy(h0, compute), compute_copy(c0, compute), compute_copy(w_ih, compute),
      compute_copy(w_hh, compute), compute_copy(b_ih, compute), compute_copy(b_hh, compute), results);
  results.output = results.output.to(type);
  results.h_n = results.h_n.to(type);
  results.c_n = results.c_n.to(type);
  return results.tuple();
}

ScanRnnGrads scan_rnn_backward_cpu(const std::optional<at::Tensor>& grad_output,
                                   const std::optional<at::Tensor>& grad_h_n, const std::optional<at::Tensor>& grad_c_n,
                                   const at::Tensor& input, const at::Tensor& h0, const std::optional<at::Tensor>& c0,
                                   const at::Tensor& w_ih, const at::Tensor& w_hh,
                                   const std::optional<at::Tensor>& b_ih, const std::optional<at::Tensor>& b_hh,
                                   const at::Tensor& output, const at::Tensor& gates, const at::Tensor& cells,
                                   c10::string_view cell_name, bool reverse, std::array<bool, 7> output_mask) {
  const char* op = "weft::scan_rnn_backward";
  const Cell cell = parse_cell(op, cell_name);
  const auto s = check_scan_rnn(op, cell, input, h0, c0, w_ih, w_hh, b_ih, b_hh);
  check_scan_rnn_saved(op, cell, s, input, grad_output, grad_h_n, grad_c_n, output, gates, cells);
  const auto compute = accumulate_type(input.scalar_type());
  const auto options = input.options().dtype(compute);
  const at::Tensor states = compute_copy(output, compute);
  const at::Tensor dgates = at::empty({s.T, s.B, chain_blocks(cell) * s.H}, options);
  const at::Tensor grad_h0 = at::empty({s.B, s.H}, options);
  const at::Tensor grad_c0 = at::empty({cell == Cell::kLstm ? s.B : 0, s.H}, options);
  const auto run = compute == at::kDouble ? chain<double> : chain<float>;
  run(cell, reverse, s, compute_copy(grad_output, compute), compute_copy(grad_h_n, compute),
      compute_copy(grad_c_n, compute), compute_copy(h0, compute), compute_copy(c0, compute),
      compute_copy(w_hh, compute), states, compute_copy(gates, compute), compute_copy(cells, compute), dgates, grad_h0,
      grad_c0);
  return without_undefined(scan_rnn_parameter_grads(dgates, input, h0, states, reverse, w_ih, w_hh, b_ih, b_hh, cell,
                                                    output_mask, grad_h0, grad_c0),
                           input);
}

TORCH_LIBRARY_IMPL(weft, CPU, m) {
  m.impl("scan_rnn", &scan_rnn_cpu);
  m.impl("scan_rnn_backward", &scan_rnn_backward_cpu);
}

}  // namespace
}  // namespace weft
