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

// What mend_walk.cpp has is none of these.
bool weft::scan::mend_by_walk(const SliceMend&, const SliceStates&, const SliceGradients&, cudaStream_t) {
  return false;
}

// which: 0 the message, of A and values into the third pointer, flag 1, or 3 in pieces of time; 1 mending, of A, the
// state, `came`, x, the x before each step, the first of them and grad_A, flag 1 with gradients, 2 by blocks of many
// warps. sizes: T, B, H and A's strides, which all tensors of steps have. 2 states between dense slices: messages,
// entered, end, products and `came`; 3 gradients between them: messages, products and `left`, flag 1 with shares.
// sizes: ranks, B, H, matrices, order and whether in reverse. 4 what comes in and mending at once: messages, entered,
// end, products, `came`, A and x; 5 the same of gradients: messages, products, `left`, A, grad_b, the x before each
// step, the first of them and grad_A. sizes: T, B, H and strides as of 1, ranks and order.
extern "C" void run(int which, int wide, int flag, const int64_t* s, void* const* p) {
  const auto dtype = wide ? weft::DType::f64 : weft::DType::f32;
  std::vector<char> memory;
  const auto allocate = [&](size_t bytes) {
    memory.resize(bytes);
    return static_cast<void*>(memory.data());
  };
  if (which == 2) {
    slice_states_cuda({p[0], s[0], s[1], s[2], s[3], s[4], s[5] != 0, flag == 1, wide != 0, p[1], p[2],
                       static_cast<double*>(p[3]), static_cast<int32_t*>(p[4])},
                      allocate, nullptr);
  } else if (which == 3) {
    slice_gradients_cuda(
        {p[0], static_cast<const double*>(p[1]), s[0], s[1], s[2], s[3], s[4], s[5] != 0, flag == 1, wide != 0, p[2]},
        allocate, nullptr);
  } else if (which == 0) {
    weft::processors = flag == 3 ? 132 : 1;
    slice_message_cuda({p[0], s[3], s[4], s[0], s[1], s[2], dtype}, p[1], flag & 1, p[2], allocate, nullptr);
  } else if (which == 4) {
    SliceMend mend{};
    mend.A = p[5], mend.A_t = s[3], mend.A_b = s[4], mend.x = p[6], mend.x_t = s[3], mend.x_b = s[4];
    mend.T = s[0], mend.B = s[1], mend.H = s[2], mend.dtype = dtype;
    slice_finish_cuda(mend,
                      {p[0], s[5], s[1], s[2], 0, s[6], false, false, wide != 0, p[1], p[2], static_cast<double*>(p[3]),
                       static_cast<int32_t*>(p[4])},
                      nullptr);
  } else if (which == 5) {
    SliceMend mend{};
    mend.A = p[3], mend.A_t = s[3], mend.A_b = s[4], mend.x = p[4], mend.x_t = s[3], mend.x_b = s[4];
    mend.before = p[5], mend.before_t = s[3], mend.before_b = s[4], mend.first = p[6];
    mend.grad_A = p[7], mend.grad_A_t = s[3], mend.grad_A_b = s[4];
    mend.T = s[0], mend.B = s[1], mend.H = s[2], mend.gradients = true, mend.dtype = dtype;
    slice_finish_gradients_cuda(
        mend, {p[0], static_cast<const double*>(p[1]), s[5], s[1], s[2], 0, s[6], false, flag == 1, wide != 0, p[2]},
        nullptr);
  } else {
    weft::processors = flag == 2 ? 132 : 1;
    slice_mend_cuda({p[0], s[3], s[4], p[1],      static_cast<int32_t*>(p[2]),
                     p[3], s[3], s[4], p[4],      s[3],
                     s[4], p[5], p[6], s[3],      s[4],
                     s[0], s[1], s[2], flag == 1, dtype},
                    nullptr);
  }
}
