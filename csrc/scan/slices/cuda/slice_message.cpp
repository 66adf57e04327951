// Slices on CUDA: workspace and registration.
#include "scan/slices/slice_message.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "scan/slices/cuda/slice_kernels.h"

namespace weft::scan {
namespace {

// Of the current device, for as long as the object lives: the stream's later work comes after what used it.
class SliceMemory {
 public:
  Workspace workspace() {
    return [this](size_t bytes) {
      memory_ = at::empty({int64_t(bytes)}, at::TensorOptions(at::kCUDA).dtype(at::kByte));
      return memory_.data_ptr();
    };
  }

 private:
  at::Tensor memory_;
};

void message(const SliceProduct& product, const at::Tensor& value, bool leaves, const at::Tensor& message) {
  SliceMemory memory;
  slice_message_cuda(product, value.const_data_ptr(), leaves, message.data_ptr(), memory.workspace(),
                     at::cuda::getCurrentCUDAStream());
}

void states(const SliceStates& s) {
  SliceMemory memory;
  slice_states_cuda(s, memory.workspace(), at::cuda::getCurrentCUDAStream());
}

void gradients(const SliceGradients& s) {
  SliceMemory memory;
  slice_gradients_cuda(s, memory.workspace(), at::cuda::getCurrentCUDAStream());
}

void mend(const SliceMend& m) {
  slice_mend_cuda(m, at::cuda::getCurrentCUDAStream());
}

void finish(const SliceMend& m, const SliceStates& s) {
  slice_finish_cuda(m, s, at::cuda::getCurrentCUDAStream());
}

void finish_gradients(const SliceMend& m, const SliceGradients& s) {
  slice_finish_gradients_cuda(m, s, at::cuda::getCurrentCUDAStream());
}

constexpr SliceKernels kKernels{message, states, gradients, mend, finish, finish_gradients};

}  // namespace

TORCH_LIBRARY_IMPL(weft, CUDA, m) {
  m.impl("slice_message", [](const at::Tensor& A, const at::Tensor& value, bool leaves) {
    const c10::cuda::OptionalCUDAGuard guard(A.device());
    return slice_message(kKernels, A, value, leaves);
  });
  m.impl("slice_states", [](const at::Tensor& messages, const at::Tensor& value, int64_t order, bool reverse,
                            int64_t matrices, bool shares) {
    const c10::cuda::OptionalCUDAGuard guard(value.device());
    return slice_states(kKernels, messages, value, order, reverse, matrices, shares);
  });
  m.impl("slice_left", [](const at::Tensor& messages, const at::Tensor& products, int64_t order, bool reverse) {
    const c10::cuda::OptionalCUDAGuard guard(messages.device());
    return slice_left(kKernels, messages, products, order, reverse);
  });
  m.impl("slice_mend_", [](const at::Tensor& x, const at::Tensor& A, const at::Tensor& state,
                           const std::optional<at::Tensor>& came, bool reverse) {
    const c10::cuda::OptionalCUDAGuard guard(x.device());
    slice_mend(kKernels, x, A, state, came, reverse);
  });
  m.impl("slice_mend_gradients_", [](const at::Tensor& grad_b, const std::optional<at::Tensor>& grad_A,
                                     const at::Tensor& A, const std::optional<at::Tensor>& x,
                                     const std::optional<at::Tensor>& first, const at::Tensor& state, bool reverse) {
    const c10::cuda::OptionalCUDAGuard guard(grad_b.device());
    slice_mend_gradients(kKernels, grad_b, grad_A, A, x, first, state, reverse);
  });
  m.impl("slice_finish_",
         [](const at::Tensor& x, const at::Tensor& A, const at::Tensor& messages, int64_t order, bool reverse) {
           const c10::cuda::OptionalCUDAGuard guard(x.device());
           return slice_finish(kKernels, x, A, messages, order, reverse);
         });
  m.impl("slice_finish_gradients_",
         [](const at::Tensor& grad_b, const std::optional<at::Tensor>& grad_A, const at::Tensor& A, const at::Tensor& x,
            const std::optional<at::Tensor>& start, const at::Tensor& messages, const at::Tensor& products,
            int64_t order, bool reverse) {
           const c10::cuda::OptionalCUDAGuard guard(grad_b.device());
           return slice_finish_gradients(kKernels, grad_b, grad_A, A, x, start, messages, products, order, reverse);
         });
}

}  // namespace weft::scan
