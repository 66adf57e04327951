// The kernels of csrc/scan/slices/cuda, blocks one after the other. The caller compares.
#include "emulator.h"
#define __shared__ static
#include "scan/slices/cuda/slice_kernels.cu"

using namespace weft::scan;

// which: 0 the message, of A and values into the third pointer; 1 mending, of A, the state, `came`, x, the x before
// each step, the first of them and grad_A, flag 1 with gradients, 2 by blocks of many warps. sizes: T, B, H and A's
// strides, which all tensors of steps have.
extern "C" void run(int which, int wide, int flag, const int64_t* s, void* const* p) {
  const auto dtype = wide ? weft::DType::f64 : weft::DType::f32;
  if (which == 0) {
    std::vector<char> memory;
    const auto allocate = [&](size_t bytes) {
      memory.resize(bytes);
      return static_cast<void*>(memory.data());
    };
    slice_message_cuda({p[0], s[3], s[4], s[0], s[1], s[2], dtype}, p[1], flag, p[2], allocate, nullptr);
  } else {
    weft::processors = flag == 2 ? 132 : 1;
    slice_mend_cuda({p[0], s[3], s[4], p[1],      static_cast<int32_t*>(p[2]),
                     p[3], s[3], s[4], p[4],      s[3],
                     s[4], p[5], p[6], s[3],      s[4],
                     s[0], s[1], s[2], flag == 1, dtype},
                    nullptr);
  }
}
