// Gradients of layers' parameters, given what went into each layer and the gradient that reaches its output. After a
// chain has given all of these, no layer waits for another: that is what BPPSA makes parallel.
//
// On CUDA kernels of our own compute most layers, all in one launch or two, without TF32: see
// cuda/parameter_gradients.h. Of the others, layers that are alike, of equal sizes and settings, are computed together
// where there are several and each is small: one batched product of the windows of all inputs, without TF32. What then
// is left are torch's own gradients, with torch's settings, one after the other; where `branches` says so, on streams
// of their own that begin at and end in the caller's, which a CUDA graph captures as branches.
//
// Nothing waits for the device.
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
