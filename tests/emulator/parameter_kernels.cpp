// The kernels of csrc/scan/chain/cuda/parameter_kernels.cu.
#include "common/launch.cuh"
#include "emulator.h"

// Blocks run one after the other, so that what is static is a block's own.
#define __shared__
#define __align__(bytes) __attribute__((aligned(bytes)))

#include "scan/chain/cuda/parameter_kernels.cu"

// Of each layer 15 sizes, in the order of ParameterGradient, and the pointers of input, grad, weight and bias.
extern "C" void run(int count, const int* sizes, void* const* pointers) {
  std::vector<weft::scan::ParameterGradient> layers;
  for (int k = 0; k < count; ++k, pointers += 4) {
    weft::scan::ParameterGradient l{};
    l.input = static_cast<const float*>(pointers[0]), l.grad = static_cast<const float*>(pointers[1]);
    l.weight = static_cast<float*>(pointers[2]), l.bias = static_cast<float*>(pointers[3]);
    for (int* size : {&l.batch, &l.inputs, &l.outputs}) *size = *sizes++;
    for (int* pair : {l.size, l.out, l.kernel, l.stride, l.padding, l.dilation}) {
      pair[0] = *sizes++, pair[1] = *sizes++;
    }
    layers.push_back(l);
  }
  weft::processors = 3;  // libraries in one process share it, and some set another
  std::unique_ptr<float4[]> held;
  const auto memory = [&](int64_t floats) {
    held.reset(new float4[floats / 4 + 1]);
    std::memset(held.get(), 0xff, floats * sizeof(float));  // NaN
    return reinterpret_cast<float*>(held.get());
  };
  weft::scan::parameter_gradients_cuda(layers.data(), count, memory, nullptr);
}
