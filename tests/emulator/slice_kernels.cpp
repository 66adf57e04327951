// The kernels of csrc/scan/slices/cuda, blocks one after the other. The caller compares.
#include "emulator.h"
inline double __shfl_xor_sync(unsigned, double x, int lanes) {
  uint32_t mine[2];
  std::memcpy(mine, &x, 8);
  double other;
  std::memcpy(&other, emulator::gather(mine, 2)[emulator::current->lane ^ lanes], 8);
  return other;
}
#define __shared__ static
#include "scan/slices/cuda/slice_kernels.cu"

using namespace weft::scan;

// which: 0 the message, of A and values into the third pointer; 1 mending, of A, the state, `came`, x, the x before
// each step, the first of them and grad_A, flag 1 with gradients, 2 by blocks of many warps. sizes: T, B, H and A's
// strides, which all tensors of steps have. 2 states between dense slices: messages, entered, end, products and `came`;
// 3 gradients between them: messages, products and `left`, flag 1 with shares. sizes: ranks, B, H, matrices, order and
// whether in reverse.
extern "C" void run(int which, int wide, int flag, const int64_t* s, void* const* p) {
  const auto dtype = wide ? weft::DType::f64 : weft::DType::f32;
  std::vector<char> memory;
  const auto allocate = [&](size_t bytes) {
    memory.resize(bytes);
    return static_cast<void*>(memory.data());
  };
  if (which == 2) {
    slice_states_cuda({p[0], s[0], s[1], s[2], s[3], s[4], s[5] != 0, wide != 0, p[1], p[2], static_cast<double*>(p[3]),
                       static_cast<int32_t*>(p[4])},
                      allocate, nullptr);
  } else if (which == 3) {
    slice_gradients_cuda(
        {p[0], static_cast<const double*>(p[1]), s[0], s[1], s[2], s[3], s[4], s[5] != 0, flag == 1, wide != 0, p[2]},
        allocate, nullptr);
  } else if (which == 0) {
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
