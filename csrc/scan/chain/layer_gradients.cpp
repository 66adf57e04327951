#include "scan/chain/layer_gradients.h"

#include <ATen/Context.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/stack.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <optional>
#include <tuple>

#ifdef WEFT_WITH_CUDA
#include "scan/chain/cuda/parameter_gradients.h"
#endif

namespace weft::scan {
namespace {

constexpr size_t kFewest = 4;              // layers that are worth being computed together
constexpr int64_t kMostWindows = 1 << 20;  // numbers of a layer's windows, beyond which its own kernel fills the device
constexpr int64_t kMostTogether = 1 << 26;  // numbers of all windows at a time
constexpr size_t kBranches = 8;

// Positions of an output.
int64_t positions(const Layer& l) {
  int64_t n = 1;
  for (int64_t d = 2; d < l.grad.dim(); ++d) n *= l.grad.size(d);
  return n;
}

// Numbers of a layer's input as its products read it: an element for each tap, or all of a linear layer's.
int64_t windows(const Layer& l) {
  if (!l.conv) return l.input.numel();
  return l.weight.size(0) == 0 ? 0 : l.weight.numel() / l.weight.size(0) * positions(l) * l.input.size(0);
}

bool may_join(const Layer& l) {
  return l.wants_weight && l.input.numel() > 0 && l.grad.numel() > 0 && (!l.conv || l.conv->groups == 1) &&
         windows(l) <= kMostWindows;
}

bool alike(const Layer& a, const Layer& b) {
  return a.conv == b.conv && a.wants_bias == b.wants_bias && a.input.sizes() == b.input.sizes() &&
         a.weight.sizes() == b.weight.sizes() && a.grad.sizes() == b.grad.sizes() &&
         a.input.scalar_type() == b.input.scalar_type();
}

LayerGradient one(const Layer& l) {
  LayerGradient found;
  if (l.conv) {
    const at::IntArrayRef bias = l.weight.sizes().slice(0, 1);
    const std::vector<int64_t> none(l.conv->stride.size(), 0);
    std::tie(std::ignore, found.weight, found.bias) = at::convolution_backward(
        l.grad, l.input, l.weight, l.wants_bias ? at::OptionalIntArrayRef(bias) : std::nullopt, l.conv->stride,
        l.conv->padding, l.conv->dilation, false, none, l.conv->groups, {false, l.wants_weight, l.wants_bias});
    return found;
  }
  const at::Tensor grad = l.grad.reshape({-1, l.weight.size(0)});
  if (l.wants_weight) found.weight = at::mm(grad.t(), l.input.reshape({-1, l.weight.size(1)}));
  if (l.wants_bias) found.bias = grad.sum(0);
  return found;
}

// The windows of stacked inputs (L, B, C, ...): (L, C * taps, B * positions).
at::Tensor windows_of(const at::Tensor& inputs, const Layer& like) {
  const ConvSettings& c = *like.conv;
  const int64_t dims = int64_t(c.stride.size()), L = inputs.size(0), B = inputs.size(1), C = inputs.size(2);
  std::vector<int64_t> pad;
  for (int64_t d = dims - 1; d >= 0; --d) pad.insert(pad.end(), 2, c.padding[d]);
  const bool padded = std::any_of(pad.begin(), pad.end(), [](int64_t p) { return p != 0; });
  const at::Tensor x = padded ? at::constant_pad_nd(inputs, pad) : inputs;
  std::vector<int64_t> sizes = {L, C}, strides = {x.stride(0), x.stride(2)};
  for (int64_t d = 0; d < dims; ++d) {
    sizes.push_back(like.weight.size(2 + d)), strides.push_back(c.dilation[d] * x.stride(3 + d));
  }
  sizes.push_back(B), strides.push_back(x.stride(1));
  for (int64_t d = 0; d < dims; ++d) {
    sizes.push_back(like.grad.size(2 + d)), strides.push_back(c.stride[d] * x.stride(3 + d));
  }
  return at::as_strided(x, sizes, strides).reshape({L, -1, B * positions(like)});
}

// Of layers that are alike.
void together(const std::vector<Layer>& layers, const std::vector<size_t>& which, std::vector<LayerGradient>& found) {
  const at::NoTF32Guard no_tf32;
  const Layer& like = layers[which[0]];
  std::vector<at::Tensor> inputs, grads;
  for (size_t i : which) {
    inputs.push_back(layers[i].input.contiguous()), grads.push_back(layers[i].grad.contiguous());
  }
  const int64_t L = int64_t(which.size()), outputs = like.weight.size(0);
  at::Tensor x = at::stack(inputs), g = at::stack(grads), weights, biases;
  if (like.conv) {
    const int64_t B = like.input.size(0);
    g = g.reshape({L, B, outputs, -1}).transpose(1, 2).reshape({L, outputs, -1});
    weights = at::bmm(g, windows_of(x, like).transpose(1, 2));
    if (like.wants_bias) biases = g.sum(-1);
  } else {
    g = g.reshape({L, -1, outputs});
    weights = at::bmm(g.transpose(1, 2), x.reshape({L, -1, like.weight.size(1)}));
    if (like.wants_bias) biases = g.sum(1);
  }
  for (int64_t k = 0; k < L; ++k) {
    found[which[k]].weight = weights.select(0, k).view(like.weight.sizes());
    if (like.wants_bias) found[which[k]].bias = biases.select(0, k);
  }
}

// Streams that begin where the caller's is, for work that is given to them in turn, and that the caller's waits for.
class Branches {
 public:
  Branches(at::Device device, size_t count) : impl_(device.type()), main_(impl_.getStream(device)) {
    c10::Event begin(device.type());
    begin.record(main_);
    for (size_t i = 0; i < count; ++i) {
      streams_.push_back(impl_.getStreamFromGlobalPool(device));
      begin.block(streams_.back());
    }
  }
  const c10::Stream& next() { return streams_[turn_++ % streams_.size()]; }
  // Before what the branches have written, or read, is used again.
  void join() {
    for (const c10::Stream& stream : streams_) {
      c10::Event end(stream.device_type());
      end.record(stream);
      end.block(main_);
    }
  }

 private:
  c10::impl::VirtualGuardImpl impl_;
  c10::Stream main_;
  std::vector<c10::Stream> streams_;
  size_t turn_ = 0;
};

}  // namespace

std::vector<LayerGradient> layer_gradients(const std::vector<Layer>& layers, bool branches) {
  std::vector<LayerGradient> found(layers.size());
  // Work that does not depend on other work: those of our own kernels, layers that are alike, or one.
  std::vector<size_t> by_kernels;
  std::vector<std::vector<size_t>> work, groups;
  for (size_t i = 0; i < layers.size(); ++i) {
#ifdef WEFT_WITH_CUDA
    if (takes_parameter_kernels(layers[i])) {
      by_kernels.push_back(i);
      continue;
    }
#endif
    if (!may_join(layers[i])) {
      work.push_back({i});
      continue;
    }
    const auto group = std::find_if(groups.begin(), groups.end(),
                                    [&](const auto& members) { return alike(layers[members[0]], layers[i]); });
    group == groups.end() ? groups.push_back({i}) : group->push_back(i);
  }
  for (const auto& group : groups) {
    const size_t most = std::max<int64_t>(1, kMostTogether / std::max<int64_t>(windows(layers[group[0]]), 1));
    for (size_t begin = 0; begin < group.size(); begin += most) {
      const size_t end = std::min(group.size(), begin + most);
      if (end - begin >= kFewest) {
        work.emplace_back(group.begin() + int64_t(begin), group.begin() + int64_t(end));
      } else {
        for (size_t i = begin; i < end; ++i) work.push_back({group[i]});
      }
    }
  }
  // The branches begin before our own kernels, which are beside them.
  std::optional<Branches> streams;
  if (branches && !work.empty() && work.size() + !by_kernels.empty() > 1) {
    streams.emplace(layers[0].input.device(), std::min(kBranches, work.size()));
  }
#ifdef WEFT_WITH_CUDA
  if (!by_kernels.empty()) {
    std::vector<const Layer*> own;
    for (size_t i : by_kernels) own.push_back(&layers[i]);
    std::vector<LayerGradient> gradients = parameter_gradients(own);
    for (size_t k = 0; k < own.size(); ++k) found[by_kernels[k]] = std::move(gradients[k]);
  }
#endif
  const auto run = [&](const std::vector<size_t>& which) {
    if (which.size() == 1) {
      found[which[0]] = one(layers[which[0]]);
    } else {
      together(layers, which, found);
    }
  };
  if (!streams) {
    for (const auto& which : work) run(which);
    return found;
  }
  // The largest first, so that none begins last.
  const auto size = [&](const std::vector<size_t>& which) {
    return int64_t(which.size()) * windows(layers[which[0]]) * layers[which[0]].weight.size(0);
  };
  std::stable_sort(work.begin(), work.end(), [&](const auto& a, const auto& b) { return size(a) > size(b); });
  for (const auto& which : work) {
    const c10::StreamGuard guard(streams->next());
    run(which);
  }
  streams->join();
  return found;
}

}  // namespace weft::scan
