// The layers' sizes, allocation, device and stream.
#include "scan/chain/cuda/parameter_gradients.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>

#include "common/cuda/device_costs.h"
#include "common/cuda/tf32.h"
#include "common/integers.h"
#include "common/tensor.h"
#include "scan/chain/cuda/parameter_kernels.h"

namespace weft::scan {
namespace {

// Whether the memory of a tensor is its numbers, of which nobody else keeps an account.
bool is_plain(const at::Tensor& t) {
  constexpr c10::DispatchKeySet kOthers({c10::DispatchKey::Batched, c10::DispatchKey::FuncTorchBatched,
                                         c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Functionalize,
                                         c10::DispatchKey::Python, c10::DispatchKey::Negative,
                                         c10::DispatchKey::ZeroTensor});
  return t.is_cuda() && t.scalar_type() == at::kFloat && t.layout() == at::kStrided && !t.key_set().has_any(kOthers);
}

// Of a contiguous tensor, the sizes behind the channels from the last: 1 where there are none.
void put_image(int (&to)[2], const at::Tensor& t) {
  to[0] = t.dim() == 4 ? int(t.size(2)) : 1, to[1] = t.dim() > 2 ? int(t.size(-1)) : 1;
}
// Of one number or two, the last of which is the last dimension's.
void put_pair(int (&to)[2], const std::vector<int64_t>& given, int first) {
  to[0] = given.size() == 2 ? int(given[0]) : first, to[1] = int(given.back());
}

}  // namespace

bool takes_parameter_kernels(const Layer& l) {
  const auto fits = [](const at::Tensor& t) {
    if (!is_plain(t) || t.numel() == 0 || t.numel() > kMostNumbers) return false;
    const at::IntArrayRef image = t.sizes().slice(std::min<size_t>(2, t.sizes().size()));
    return std::all_of(image.begin(), image.end(), [](int64_t n) { return n < kLargestImage; });
  };
  if (!l.wants_weight || !fits(l.input) || !fits(l.grad) || !fits(l.weight)) return false;
  if (c10::impl::dispatch_mode_enabled()) return false;
  if (l.conv) {
    if (l.conv->groups != 1 || l.input.dim() < 3 || l.input.dim() > 4) return false;
    for (size_t d = 0; d < l.conv->stride.size(); ++d) {
      const int64_t reach = l.conv->dilation[d] * (l.weight.size(int64_t(d) + 2) - 1);
      if (std::max({reach, 2 * l.conv->padding[d], l.conv->stride[d]}) >= kLargestImage) return false;
    }
  } else if (l.input.dim() != 2) {
    return false;
  }
  // Of whole tiles, however little of one a layer fills.
  const auto tiles = [](int64_t n) { return double(kGradientTile) * double(ceil_div(n, kGradientTile)); };
  const int64_t outputs = l.weight.size(0);
  const double products = tiles(outputs) * tiles(l.weight.numel() / outputs) * double(l.grad.numel() / outputs);
  const bool tf32 = takes_tf32(l.conv ? at::Float32Op::CONV : at::Float32Op::MATMUL);
  const costs::Table& most = device_costs(l.input.device().index()).table("scan.parameter_gradients");
  return products <= most(tf32 ? "products_beside_tf32" : "products");
}

std::vector<LayerGradient> parameter_gradients(const std::vector<const Layer*>& layers) {
  std::vector<LayerGradient> found;
  std::vector<ParameterGradient> all;
  std::vector<at::Tensor> held;
  const c10::cuda::CUDAGuard guard(layers[0]->input.device());
  const at::TensorOptions options = at::TensorOptions().dtype(at::kFloat).device(layers[0]->input.device());
  for (const Layer* l : layers) {
    ParameterGradient g{};
    held.push_back(l->input.contiguous()), g.input = held.back().const_data_ptr<float>();
    held.push_back(l->grad.contiguous()), g.grad = held.back().const_data_ptr<float>();
    LayerGradient& own = found.emplace_back();
    own.weight = at::empty(l->weight.sizes(), options), g.weight = own.weight.mutable_data_ptr<float>();
    if (l->wants_bias) {
      own.bias = at::empty(l->weight.sizes().slice(0, 1), options), g.bias = own.bias.mutable_data_ptr<float>();
    }
    g.batch = int(l->input.size(0)), g.inputs = int(l->weight.size(1)), g.outputs = int(l->weight.size(0));
    put_image(g.size, l->input), put_image(g.out, l->grad), put_image(g.kernel, l->weight);
    std::fill_n(g.stride, 2, 1), std::fill_n(g.dilation, 2, 1);
    if (l->conv) {
      put_pair(g.stride, l->conv->stride, 1), put_pair(g.dilation, l->conv->dilation, 1);
      put_pair(g.padding, l->conv->padding, 0);
    }
    all.push_back(g);
  }
  const auto memory = [&](int64_t floats) {
    held.push_back(at::empty({floats}, options));
    return held.back().mutable_data_ptr<float>();
  };
  parameter_gradients_cuda(all.data(), int64_t(all.size()), memory, at::cuda::getCurrentCUDAStream());
  return found;
}

}  // namespace weft::scan
