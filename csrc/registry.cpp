// The table of contents: every operator of torch.ops.weft, one block per room.
// Shapes, dtypes, aliasing and errors are in the header of each op, <room>/<op>.h, the rules for fake tensors, autocast
// and vmap in the room's folder of python/weft.
#include <torch/library.h>

#include "vertex/program/object.h"  // which registers the class that schemas name

TORCH_LIBRARY(weft, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};

  // sparse: csrc/sparse/
  m.def("csr_mm(Tensor[] pattern, Tensor[] transposed, Tensor? values, Tensor x) -> Tensor", tags);
  m.def("csr_sampled_mm(Tensor[] pattern, Tensor[] transposed, Tensor left, Tensor right, bool shared) -> Tensor",
        tags);
  m.def("csr_transpose(Tensor crow, Tensor col, SymInt columns) -> (Tensor crow, Tensor col, Tensor index)", tags);
  m.def(
      "conv_pattern(Tensor[] windows, int groups, int in_channels, int out_channels, int output_positions, bool wide) "
      "-> (Tensor crow, Tensor col)",
      tags);
  m.def("conv_values(Tensor weight, Tensor[] windows, int groups) -> Tensor", tags);
  m.def("conv_values_backward(Tensor grad, Tensor[] windows, int groups, int out_channels, int in_channels) -> Tensor",
        tags);
  m.def(
      "max_pool_values(Tensor input, Tensor crow, Tensor col, int[] kernel, int[] stride, int[] padding, "
      "int[] dilation, int[] output) -> Tensor",
      tags);
  m.def(
      "csr_matmul_plan(Tensor[] a, Tensor[] b, *, bool? gpu=None) "
      "-> (Tensor crow, Tensor col, Tensor axpy, Tensor accumulate, Tensor gather, Tensor starts, Tensor left, "
      "Tensor right, Tensor shared, Tensor expand, Tensor pieces, Tensor segments, Tensor lists, Tensor narrow, Tensor "
      "info)",
      tags);
  m.def("csr_matmul(Tensor[] patterns, Tensor x, Tensor y) -> Tensor", tags);
  m.def("csr_matmul_left(Tensor[] patterns, Tensor y, Tensor g, bool shared) -> Tensor", tags);
  m.def("csr_matmul_right(Tensor[] patterns, Tensor x, Tensor g, bool shared) -> Tensor", tags);
  m.def("csr_chain(Tensor grad, Tensor[] crows, Tensor[] cols, Tensor[] values) -> Tensor[]", tags);
  m.def(
      "layer_chain(Tensor grad, Tensor[] crows, Tensor[] cols, Tensor[] values, Tensor[] sources, int[] reads) "
      "-> Tensor[]",
      tags);
  m.def("zeros_changed(Tensor[] weights, Tensor[] stored) -> Tensor", tags);

  // scan: csrc/scan/
  m.def(
      "linear_scan(Tensor A, Tensor b, Tensor? x0=None, *, bool reverse=False, bool transpose=False, "
      "bool batch_first=False) -> Tensor",
      tags);
  m.def(
      "linear_scan_backward(Tensor grad, Tensor A, Tensor? x, Tensor? x0, bool reverse, bool transpose, "
      "bool[3] output_mask, bool batch_first=False) -> (Tensor, Tensor, Tensor)",
      tags);
  m.def(
      "linear_scan_readout(Tensor A, Tensor b, Tensor c, Tensor? x0=None, *, bool reverse=False, "
      "bool batch_first=False, bool save=False) -> (Tensor y, Tensor starts)",
      tags);
  m.def(
      "linear_scan_readout_backward(Tensor grad, Tensor A, Tensor b, Tensor c, Tensor? x0, Tensor starts, bool "
      "reverse, "
      "bool batch_first, bool[4] output_mask) -> (Tensor, Tensor, Tensor, Tensor)",
      tags);
  m.def("scan_cell(Tensor input, Tensor? h, Tensor?[] weights, *, str cell) -> (Tensor output, Tensor h_next)", tags);
  m.def("slice_product(Tensor A, bool reverse, bool transpose) -> Tensor", tags);
  m.def(
      "slice_maps(Tensor A, Tensor b, Tensor? x0, int chunks, bool reverse, bool transpose, bool told) "
      "-> (Tensor maps, Tensor value, Tensor message)",
      tags);
  m.def(
      "slice_replay_(Tensor(a!) x, Tensor A, Tensor b, Tensor(b!) maps, Tensor state, Tensor? came, int chunks, bool "
      "reverse, bool transpose) -> ()",
      tags);
  m.def("slice_message(Tensor A, Tensor value, bool leaves) -> Tensor", tags);
  m.def(
      "slice_states(Tensor messages, Tensor value, int order, bool reverse, int matrices=0, bool shares=False) "
      "-> (Tensor entered, Tensor end, Tensor products, Tensor came)",
      tags);
  m.def("slice_left(Tensor messages, Tensor products, int order, bool reverse) -> Tensor", tags);
  m.def("slice_mend_(Tensor(a!) x, Tensor A, Tensor state, Tensor? came, bool reverse) -> ()", tags);
  m.def(
      "slice_mend_gradients_(Tensor(a!) grad_b, Tensor(b!)? grad_A, Tensor A, Tensor? x, Tensor? first, Tensor state, "
      "bool reverse) -> ()",
      tags);
  m.def("slice_begin(Tensor A, Tensor b, Tensor? x0, bool first, bool reverse) -> (Tensor x, Tensor message)", tags);
  m.def(
      "slice_finish_(Tensor(a!) x, Tensor A, Tensor messages, int order, bool reverse) "
      "-> (Tensor entered, Tensor end, Tensor products)",
      tags);
  m.def(
      "slice_begin_gradients(Tensor grad, Tensor? grad_entered, Tensor? grad_end, Tensor A, Tensor x, Tensor? start, "
      "bool first, bool reverse, bool of_A) -> (Tensor grad_A, Tensor grad_b, Tensor message)",
      tags);
  m.def(
      "slice_finish_gradients_(Tensor(a!) grad_b, Tensor(b!)? grad_A, Tensor A, Tensor x, Tensor? start, Tensor "
      "messages, Tensor products, int order, bool reverse) -> Tensor",
      tags);
  m.def("chain_backward(Tensor grad, Tensor[] jacobians, int levels=-1) -> Tensor[]", tags);

  m.def(
      "pointwise_scan(Tensor[] init, Tensor[] inputs, Tensor[] parameters, str program, bool stacked=False, "
      "bool reverse=False, str algorithm='auto', str name='pointwise_scan') -> Tensor[]",
      tags);
  m.def(
      "pointwise_scan_backward(Tensor?[] grads, Tensor[] init, Tensor[] inputs, Tensor[] parameters, Tensor[] states, "
      "str program, bool stacked, bool reverse, str algorithm, bool[] output_mask) -> Tensor[]",
      tags);

  // rnn: csrc/rnn/
  m.def(
      "rnn(Tensor input, Tensor? h0, Tensor? c0, Tensor[] weights, Tensor? batch_sizes=None, *, str cell, "
      "bool bidirectional=False, bool keep_cells=False, bool save=False, str backward='persistent', int num_heads=1) "
      "-> (Tensor output, Tensor h_n, Tensor c_n, Tensor cells, Tensor gates)",
      tags);
  m.def(
      "rnn_backward(Tensor? grad_output, Tensor? grad_h_n, Tensor? grad_c_n, Tensor? grad_cells, Tensor input, "
      "Tensor? h0, Tensor? c0, Tensor[] weights, Tensor? batch_sizes, Tensor output, Tensor cells, Tensor gates, *, "
      "str cell, bool bidirectional, bool[] output_mask, str backward='persistent', int num_heads=1) -> Tensor[]",
      tags);
  m.def(
      "rnn_slice_maps(Tensor? grad_output, Tensor input, Tensor h0, Tensor? c0, Tensor[] weights, Tensor output, "
      "Tensor cells, Tensor gates, int chunks, *, str cell) -> (Tensor maps, Tensor value, Tensor message)",
      tags);
  m.def(
      "rnn_slice_backward(Tensor maps, Tensor? grad_output, Tensor grad_h_n, Tensor? grad_c_n, Tensor input, "
      "Tensor h0, Tensor? c0, Tensor[] weights, Tensor output, Tensor cells, Tensor gates, int chunks, *, str cell, "
      "bool[] output_mask) -> Tensor[]",
      tags);
  m.def(
      "rnn_cell(Tensor input, Tensor h, Tensor? c, Tensor w_ih, Tensor w_hh, Tensor? b_ih=None, Tensor? b_hh=None, *, "
      "str cell, bool save=False, int num_heads=1) -> (Tensor h_next, Tensor c_next, Tensor gates)",
      tags);
  m.def(
      "rnn_cell_backward(Tensor? grad_h_next, Tensor? grad_c_next, Tensor input, Tensor h, Tensor? c, Tensor w_ih, "
      "Tensor w_hh, Tensor? b_ih, Tensor? b_hh, Tensor h_next, Tensor c_next, Tensor gates, *, str cell, "
      "bool[7] output_mask, int num_heads=1) -> Tensor[]",
      tags);

  // distributed: python/weft/_distributed/slice_scan.py, of the ops above and of torch's collectives; `group` is its
  // name
  m.def(
      "slice_scan(Tensor A, Tensor b, Tensor? x0, Tensor? extra, str group, bool reverse, bool transpose, "
      "bool ends) -> (Tensor x, Tensor entered, Tensor end, Tensor products)",
      tags);
  m.def(
      "slice_scan_backward(Tensor grad, Tensor grad_entered, Tensor? grad_end, Tensor A, Tensor x, Tensor entered, "
      "Tensor products, bool has_x0, str group, bool reverse, bool transpose, bool[] output_mask) "
      "-> (Tensor, Tensor, Tensor, Tensor)",
      tags);

  // offload: csrc/offload/
  m.def("zvc_compress(Tensor x) -> (Tensor mask, Tensor values, Tensor size)", tags);
  m.def("zvc_decompress(Tensor mask, Tensor values, SymInt[] shape) -> Tensor", tags);
  m.def("rle_compress(Tensor x) -> (Tensor runs, Tensor values, Tensor size)", tags);
  m.def("rle_decompress(Tensor runs, Tensor values, SymInt[] shape) -> Tensor", tags);

  // vertex: csrc/vertex/exec/
  m.def(
      "vertex_frontiers(Tensor[] inputs, Tensor[] matrices, Tensor[] vectors, Tensor schedule, Tensor host_schedule, "
      "__torch__.torch.classes.weft.VertexProgram program, SymInt num_vertices, SymInt num_inner, SymInt num_edges) -> "
      "Tensor[]",
      tags);
  m.def(
      "vertex_frontiers_backward(Tensor[] grads, Tensor[] inputs, Tensor[] matrices, Tensor[] vectors, Tensor[] saved, "
      "Tensor schedule, Tensor host_schedule, __torch__.torch.classes.weft.VertexProgram program, int[] of_inputs, "
      "int[] of_matrices, int[] of_vectors, bool overlap) -> Tensor[]",
      tags);

  // rnn, in Python: python/weft/_rnn/dropin/torch_rnn.py, torch's own recurrent kernels as ops that a compiled graph
  // can hold
  m.def(
      "torch_rnn(Tensor input, Tensor[] state, Tensor[] weights, Tensor? batch_sizes, str cell, bool bias, "
      "SymInt num_layers, bool bidirectional, ScalarType? autocast, ScalarType dtype, ScalarType cell_dtype) "
      "-> Tensor[]",
      tags);
  m.def(
      "torch_rnn_backward(Tensor[] grads, bool[] needed, Tensor input, Tensor[] state, Tensor[] weights, "
      "Tensor? batch_sizes, str cell, bool bias, SymInt num_layers, bool bidirectional, ScalarType? autocast) "
      "-> Tensor[]",
      tags);
}
