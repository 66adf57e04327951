// Gradients of the weights and biases of many layers in one launch, or in two. Torch-free.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>

namespace weft::scan {

// A convolution of one group in two dimensions; of a linear layer all sizes but channels are 1. Contiguous float32,
// none of them empty, at most kMostNumbers each; sizes, strides, dilated taps and twice the paddings of an image are
// below kLargestImage, so that no position reaches what stands for taps that there are not.
struct ParameterGradient {
  const float *input, *grad;  // (batch, inputs, size[0], size[1]), (batch, outputs, out[0], out[1])
  float *weight, *bias;       // (outputs, inputs, kernel[0], kernel[1]), (outputs,) or null: not wanted
  int batch, inputs, outputs;
  int size[2], out[2], kernel[2], stride[2], padding[2], dilation[2];
};
constexpr int kGradientTile = 64;  // output channels, and taps of input channels, that are computed together
constexpr int64_t kMostNumbers = int64_t(1) << 30, kLargestImage = 1 << 14;

// Memory on the device that is the caller's until its work on the stream is done.
using PartsMemory = std::function<float*(int64_t floats)>;

void parameter_gradients_cuda(const ParameterGradient* layers, int64_t count, const PartsMemory& memory,
                              cudaStream_t stream);

}  // namespace weft::scan
