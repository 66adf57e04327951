// The halves of a slice's scan on the CPU, where a scan is sequential in time: the first scans for the value, the
// second for the states.
#include "scan/slices/slice_maps.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace weft::scan {
namespace {

const OpHandle<at::Tensor(const at::Tensor&, bool, bool)> slice_product_op("weft::slice_product");

at::Tensor scanned(const Problem& p, const std::optional<at::Tensor>& x0) {
  return linear_scan_op(p.A, p.b, x0, p.reverse, p.transpose, false);
}

void maps_on_cpu(const Problem& p, int64_t, const at::Tensor&, const at::Tensor& value, const at::Tensor& message) {
  const at::Tensor states = scanned(p, p.x0.defined() ? std::optional(p.x0) : std::nullopt);
  value.copy_(states.select(0, p.reverse ? 0 : -1));
  if (message.numel() == 0) return;
  const int64_t channels = value.numel(), products = message.numel() - channels - 1;
  message.narrow(0, 0, products).copy_(slice_product_op(p.A, p.reverse, p.transpose).view(-1));
  message.narrow(0, products, channels).copy_(value.view(at::kInt).view(-1));
  message.select(0, -1).fill_(1);
}

void replay_on_cpu(const Problem& p, int64_t, const at::Tensor&, const int32_t* came, const at::Tensor& x) {
  x.copy_(scanned(p, came == nullptr || *came != 0 ? std::optional(p.x0) : std::nullopt));
}

constexpr SliceHalves kHalves{[](int64_t) { return int64_t(0); }, maps_on_cpu, replay_on_cpu};

}  // namespace

TORCH_LIBRARY_IMPL(weft, CPU, m) {
  m.impl("slice_maps",
         [](const at::Tensor& A, const at::Tensor& b, const std::optional<at::Tensor>& x0, int64_t chunks, bool reverse,
            bool transpose, bool told) { return slice_maps(kHalves, A, b, x0, chunks, reverse, transpose, told); });
  m.impl("slice_replay_",
         [](const at::Tensor& x, const at::Tensor& A, const at::Tensor& b, const at::Tensor& maps,
            const at::Tensor& state, const std::optional<at::Tensor>& came, int64_t chunks, bool reverse,
            bool transpose) { slice_replay(kHalves, x, A, b, maps, state, came, chunks, reverse, transpose); });
}

}  // namespace weft::scan
