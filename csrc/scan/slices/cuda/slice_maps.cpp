// The halves of a slice's scan on CUDA: workspace and registration.
#include "scan/slices/slice_maps.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "scan/linear/cuda/linear_scan.h"

namespace weft::scan {
namespace {

void check_width(const char* op, const at::Tensor& b) {
  // A matrix of one number is a diagonal.
  TORCH_CHECK_VALUE(b.dim() != 3 || (b.size(2) != 1 && b.size(2) <= kWarpMaxH), op, ": H must be 2 to ", kWarpMaxH,
                    " on CUDA, got ", b.size(2));
}

void maps_on_cuda(const Problem& p, int64_t chunks, const at::Tensor& maps, const at::Tensor& value,
                  const at::Tensor& message) {
  const Described d = describe(p, p.b);
  const int64_t rows = p.A.size(1), H = value.size(1);
  const SliceMaps told{maps.data_ptr<float>(), value.data_ptr<float>(),
                       message.numel() > 0 ? message.data_ptr<int32_t>() : nullptr, rows, rows * H * H};
  at::Tensor workspace;
  const auto allocate = [&](size_t bytes) {
    workspace = at::empty({int64_t(bytes)}, value.options().dtype(at::kByte));
    return workspace.data_ptr();
  };
  slice_maps_warp(d.args, chunks, told, allocate, at::cuda::getCurrentCUDAStream());
}

void replay_on_cuda(const Problem& p, int64_t chunks, const at::Tensor& maps, const int32_t* came,
                    const at::Tensor& x) {
  const Described d = describe(p, x);
  slice_replay_warp(d.args, chunks, maps.data_ptr<float>(), came, at::cuda::getCurrentCUDAStream());
}

constexpr SliceHalves kHalves{slice_map_floats, maps_on_cuda, replay_on_cuda};

}  // namespace

TORCH_LIBRARY_IMPL(weft, CUDA, m) {
  m.impl("slice_maps", [](const at::Tensor& A, const at::Tensor& b, const std::optional<at::Tensor>& x0, int64_t chunks,
                          bool reverse, bool transpose, bool told) {
    const c10::cuda::OptionalCUDAGuard guard(b.device());
    check_width("slice_maps", b);
    return slice_maps(kHalves, A, b, x0, chunks, reverse, transpose, told);
  });
  m.impl("slice_replay_", [](const at::Tensor& x, const at::Tensor& A, const at::Tensor& b, const at::Tensor& maps,
                             const at::Tensor& state, const std::optional<at::Tensor>& came, int64_t chunks,
                             bool reverse, bool transpose) {
    const c10::cuda::OptionalCUDAGuard guard(x.device());
    check_width("slice_replay_", b);
    slice_replay(kHalves, x, A, b, maps, state, came, chunks, reverse, transpose);
  });
}

}  // namespace weft::scan
