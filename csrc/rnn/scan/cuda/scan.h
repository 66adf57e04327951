// backward="scan" on CUDA: its forward passes beside the persistent kernel, and its backward pass.
#pragma once
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include <vector>

#include "rnn/rnn.h"

namespace weft::rnn {

// Whether the scan has kernels for a problem, and the forward pass in one warp per sequence.
bool scan_has_kernels(const RnnArgs& args, const RnnSizes& sizes);
bool warp_holds(const RnnSizes& sizes);

// The forward pass of a problem that scan_has_kernels: by one warp per sequence where warp_holds, else by torch.
RnnResults scan_forward(const RnnArgs& args, const RnnSizes& sizes, bool keep_cells, bool save);

// Gates and, where the cell has them, cells of one direction from its output: what scan_forward leaves with save. All
// in the accumulate type; h0 and c0 are given.
void scan_recover_gates(const RnnArgs& args, const RnnSizes& sizes, const RnnResults& results);

// All that rnn_backward returns, for a problem that scan_has_kernels and cells without a gradient.
std::vector<at::Tensor> scan_backward(const RnnGrads& grads, const RnnArgs& args, const RnnSizes& sizes,
                                      const at::Tensor& output, const at::Tensor& cells, const at::Tensor& gates,
                                      const c10::List<bool>& output_mask);

// The same of a slice, by the maps of its `chunks` chunks (rnn/slice/rnn_slice_maps.h), which are made first.
std::vector<at::Tensor> scan_slice_backward(const RnnGrads& grads, const RnnArgs& args, const RnnSizes& sizes,
                                            const at::Tensor& output, const at::Tensor& cells, const at::Tensor& gates,
                                            const c10::List<bool>& output_mask, const at::Tensor& maps, int chunks);
void make_scan_slice_maps(const RnnGrads& grads, const RnnArgs& args, const RnnSizes& sizes, const at::Tensor& output,
                          const at::Tensor& cells, const at::Tensor& gates, int chunks, const at::Tensor& maps,
                          const at::Tensor& value, const at::Tensor& message);

}  // namespace weft::rnn
