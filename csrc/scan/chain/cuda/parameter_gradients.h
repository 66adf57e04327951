// Gradients of layers' parameters on CUDA by kernels of our own, in one launch or two: see parameter_kernels.cu.
#pragma once
#include <vector>

#include "scan/chain/layer_gradients.h"

namespace weft::scan {

// Whether the kernels take a layer, and are expected to take less time than torch's: plain float32 on CUDA, a weight's
// gradient wanted, one or two dimensions, one group, not so many products that a library's tiles pay.
bool takes_parameter_kernels(const Layer& layer);

// Of layers that the kernels take, on one device: float32, no TF32; two runs give the same bits.
std::vector<LayerGradient> parameter_gradients(const std::vector<const Layer*>& layers);

}  // namespace weft::scan
