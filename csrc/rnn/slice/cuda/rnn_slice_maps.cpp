// The halves of a slice's backward pass on CUDA: by the kernels of backward="scan".
#include "rnn/slice/rnn_slice_maps.h"

#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "rnn/scan/cuda/scan.h"
#include "rnn/scan/cuda/scan_kernels.h"

namespace weft::rnn {
namespace {

void check_rnn_width(const char* op, const RnnArgs& args, const RnnSizes& s) {
  TORCH_CHECK_VALUE(s.H <= kWarpHidden && scan_has_kernels(args, s), op, ": H must be at most ", kWarpHidden,
                    " on CUDA, and there must be inputs; got H = ", s.H, " and ", s.I, " inputs");
}

void rnn_maps_on_cuda(const RnnSlice& slice, const RnnArgs& args, const RnnSizes& s, const at::Tensor& maps,
                      const at::Tensor& value, const at::Tensor& message) {
  const c10::cuda::CUDAGuard guard(slice.input.device());
  check_rnn_width("rnn_slice_maps", args, s);
  const std::optional<at::Tensor> none;
  make_scan_slice_maps({slice.grad_output, none, none, none}, args, s, slice.output, slice.cells, slice.gates,
                       int(slice.chunks), maps, value, message);
}

std::vector<at::Tensor> rnn_slice_back_on_cuda(const RnnSlice& slice, const RnnGrads& grads, const RnnArgs& args,
                                               const RnnSizes& s, const c10::List<bool>& output_mask,
                                               const at::Tensor& maps) {
  const c10::cuda::CUDAGuard guard(slice.input.device());
  check_rnn_width("rnn_slice_backward", args, s);
  return scan_slice_backward(grads, args, s, slice.output, slice.cells, slice.gates, output_mask, maps,
                             int(slice.chunks));
}

constexpr RnnHalves kRnnHalves{scan_slice_floats, rnn_maps_on_cuda, rnn_slice_back_on_cuda};

}  // namespace

TORCH_LIBRARY_IMPL(weft, CUDA, m) {
  register_rnn_slice<kRnnHalves>(m);
}

}  // namespace weft::rnn
