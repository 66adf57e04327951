// Gradients of layers' parameters, given what went into each layer and the gradient that reaches its output. After a
// chain has given all of these, no layer waits for another: that is what BPPSA makes parallel.
//
// Layers that are alike, of equal sizes and settings, are computed together where there are several and each is small:
// one batched product of the windows of all inputs. Other ones are torch's own gradients, one after the other; where
// `branches` says so, on streams of their own that begin at and end in the caller's, which a CUDA graph captures as
// branches.
//
// Made of ATen operations, on every device; nothing waits for the device. float32 products use no TF32 where layers are
// computed together, and torch's settings otherwise.
//
// Source: BPPSA, section 3 (Wang, Bai, Pekhimenko, MLSys 2020).
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace weft::scan {

// A convolution's settings, or none of a linear layer.
struct ConvSettings {
  std::vector<int64_t> stride, padding, dilation;
  int64_t groups;
  bool operator==(const ConvSettings&) const = default;
};

struct Layer {
  std::optional<ConvSettings> conv;
  at::Tensor input, grad, weight;  // grad of the shape of the output; batch first
  bool wants_weight, wants_bias;
};

struct LayerGradient {
  at::Tensor weight, bias;  // undefined where not wanted
};

std::vector<LayerGradient> layer_gradients(const std::vector<Layer>& layers, bool branches);

}  // namespace weft::scan
