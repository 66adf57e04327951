// The kernels of csrc/vertex/exec/cuda/float_product.cu, cluster after cluster. The caller compares.
#include "common/launch.cuh"
#include "emulator.h"
#include "vertex/exec/cuda/float_product.cu"

// sizes: rows, columns, inner; strides of left, right and the result; 1 where left, right lie along inner; `more`.
extern "C" void run(int processors, const int64_t* s, const float* left, const float* right, const float* bias,
                    float* result) {
  weft::processors = processors;
  const weft::vertex::FloatProduct p = {
      {left, s[3], s[6] != 0}, {right, s[4], s[7] != 0}, result, s[5], bias, s[0], s[1], s[2], s[8] != 0};
  weft::vertex::launch_float_product(p, nullptr);
}
