// Slices on the CPU: threads over lines of channels, steps outermost so that rows are read as they lie.
#include "scan/slices/slice_message.h"

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "common/integers.h"

namespace weft::scan {
namespace {

constexpr int64_t kSliceLine = 64;    // channels that a thread takes at once
constexpr int64_t kSliceLooks = 128;  // steps between two looks whether any of them still matters

// Calls run(row, first channel, channels) for every line of B rows of H.
template <typename Run>
void for_lines(int64_t B, int64_t H, const Run& run) {
  const int64_t lines = ceil_div(H, kSliceLine);
  at::parallel_for(0, B * lines, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t h = i % lines * kSliceLine;
      run(i / lines, h, std::min(kSliceLine, H - h));
    }
  });
}

// Of steps of type S, what rows and sums are.
template <typename S>
using Acc = std::conditional_t<std::is_same_v<S, double>, double, float>;

template <typename S, typename T = Acc<S>>
void write_message(const SliceProduct& p, const T* value, bool leaves, typename Packed<T>::Number* message) {
  const int64_t channels = p.B * p.H;
  for_lines(p.B, p.H, [&](int64_t row, int64_t h, int64_t count) {
    Scaled products[kSliceLine];
    const S* A = static_cast<const S*>(p.A) + row * p.A_b + h;
    for (int64_t t = 0; t < p.T; ++t, A += p.A_t) {
      for (int64_t i = 0; i < count; ++i) products[i].multiply(T(A[i]));
      if ((t + 1) % kFactors == 0) {
        for (int64_t i = 0; i < count; ++i) products[i].rescale();
        if ((t + 1) % kSliceLooks == 0 &&
            std::all_of(products, products + count, [](const Scaled& s) { return s.is_zero<T>(); })) {
          break;
        }
      }
    }
    for (int64_t i = 0; i < count; ++i) message[row * p.H + h + i] = pack_product<T>(products[i]);
  });
  std::memcpy(message + channels, value, channels * sizeof(T));
  message[2 * channels] = leaves;
}

void message(const SliceProduct& product, const at::Tensor& value, bool leaves, const at::Tensor& message) {
  if (product.dtype == DType::f64) {
    write_message<double>(product, value.const_data_ptr<double>(), leaves, message.data_ptr<int64_t>());
  } else if (product.dtype == DType::bf16) {
    write_message<c10::BFloat16>(product, value.const_data_ptr<float>(), leaves, message.data_ptr<int32_t>());
  } else {
    write_message<float>(product, value.const_data_ptr<float>(), leaves, message.data_ptr<int32_t>());
  }
}

// A batch row of a dense scan, as carry_between_slices has a channel.
template <typename T>
void carry_row(const SliceStates& s, int64_t row) {
  using Number = typename Packed<T>::Number;
  const int64_t H = s.H, numbers = s.product_numbers(), of_row = s.matrices > 1 ? row * H * H : 0;
  std::vector<double> state(H, 0.0), next(H);
  bool came = s.shares;
  for (int64_t i = 0; s.shares && i < s.ranks; ++i) {
    for (int64_t h = 0; h < H; ++h) {
      T share;
      std::memcpy(&share, s.message<Number>(i) + numbers + (s.B + row) * H + 1 + h, sizeof(T));
      state[h] += double(share);
    }
  }
  for (int64_t i = 0; i < s.ranks; ++i) {
    const Number* const message = s.message<Number>(i);
    if (i == s.order) {
      std::copy(state.begin(), state.end(), static_cast<T*>(s.entered) + row * H);
      if (row == 0) *s.came = came;
    }
    double* const products = s.products + i * numbers + of_row;
    for (int64_t r = 0; r < H; ++r) {
      double sum = 0;
      for (int64_t c = 0; c < H; ++c) {
        const double product = came ? unpack_product<T>(message[of_row + r * H + c]) : 0.0;
        products[r * H + c] = product;
        sum += product * state[c];
      }
      T value;
      std::memcpy(&value, message + numbers + row * H + r, sizeof(T));
      next[r] = (came ? sum : 0.0) + double(value);
    }
    state.swap(next);
    came = came || message[numbers + s.B * H] != 0;
  }
  std::copy(state.begin(), state.end(), static_cast<T*>(s.end) + row * H);
}

template <typename T>
void carry_row_back(const SliceGradients& s, int64_t row) {
  const int64_t H = s.H, of_row = s.matrices > 1 ? row * H * H : 0;
  std::vector<double> state(H, 0.0), next(H);
  for (int64_t i = 0; s.shares && i < s.ranks; ++i) {
    for (int64_t h = 0; h < H; ++h) state[h] += double(s.message<T>(i)[(s.B + row) * H + h]);
  }
  for (int64_t i = s.ranks - 1; i > s.order; --i) {
    const double* const products = s.products + i * s.matrices * H * H + of_row;
    for (int64_t c = 0; c < H; ++c) next[c] = 0;
    for (int64_t r = 0; s.enters(i) && r < H; ++r) {
      for (int64_t c = 0; c < H; ++c) next[c] += products[r * H + c] * state[r];
    }
    for (int64_t c = 0; c < H; ++c) next[c] += double(s.message<T>(i)[row * H + c]);
    state.swap(next);
  }
  std::copy(state.begin(), state.end(), static_cast<T*>(s.left) + row * H);
}

void states(const SliceStates& s) {
  if (s.matrices > 0) {
    for (int64_t row = 0; row < s.B; ++row) s.wide ? carry_row<double>(s, row) : carry_row<float>(s, row);
    return;
  }
  for (int64_t i = 0; i < s.B * s.H; ++i)
    s.wide ? carry_between_slices<double>(s, i) : carry_between_slices<float>(s, i);
}

void gradients(const SliceGradients& s) {
  if (s.matrices > 0) {
    for (int64_t row = 0; row < s.B; ++row) s.wide ? carry_row_back<double>(s, row) : carry_row_back<float>(s, row);
    return;
  }
  for (int64_t i = 0; i < s.B * s.H; ++i) {
    s.wide ? carry_back_between_slices<double>(s, i) : carry_back_between_slices<float>(s, i);
  }
}

template <typename S, typename T = Acc<S>>
void mend_slice(const SliceMend& m) {
  if (m.came != nullptr && *m.came == 0) return;
  const bool gradients = m.gradients;
  for_lines(m.B, m.H, [&](int64_t row, int64_t h, int64_t count) {
    double v[kSliceLine];
    const T* const state = static_cast<const T*>(m.state) + row * m.H + h;
    std::copy_n(state, count, v);
    const S* A = static_cast<const S*>(m.A) + row * m.A_b + h;
    S* x = static_cast<S*>(m.x) + row * m.x_b + h;
    const S* before = static_cast<const S*>(m.before) + row * m.before_b + h;
    S* grad_A = static_cast<S*>(m.grad_A) + row * m.grad_A_b + h;
    const T* const first = m.first ? static_cast<const T*>(m.first) + row * m.H + h : nullptr;
    for (int64_t t = 0; t < m.T; ++t, A += m.A_t, x += m.x_t, before += m.before_t, grad_A += m.grad_A_t) {
      bool matters = false, shows[kSliceLine], changes[kSliceLine];
      T mended[kSliceLine];
      for (int64_t i = 0; i < count; ++i) {
        if (!gradients && v[i] != 0) v[i] *= double(T(A[i]));
        const T there = T(x[i]);
        mended[i] = T(double(there) + v[i]);
        // A channel ends by itself, whatever its neighbours do: no row of the batch shows in another.
        shows[i] = !(mended[i] == there || there != there);
        matters |= shows[i];
        x[i] = S(mended[i]);
        changes[i] = !(T(x[i]) == there || there != there);
      }
      if (m.grad_A != nullptr && (t < m.T - 1 || first != nullptr)) {
        // Of a narrower type it was made of lambda as it was before it was rounded: it stays where lambda does.
        for (int64_t i = 0; i < count; ++i) {
          if (changes[i]) grad_A[i] = S(mended[i] * (t < m.T - 1 ? T(before[i]) : first[i]));
        }
      }
      if (gradients && t < m.T - 1) {
        for (int64_t i = 0; i < count; ++i) v[i] *= v[i] != 0 ? double(T(A[i])) : 1.0;
      }
      for (int64_t i = 0; i < count; ++i) v[i] = shows[i] ? v[i] : 0;
      if (!matters) return;
    }
  });
}

void mend(const SliceMend& m) {
  if (m.dtype == DType::f64) return mend_slice<double>(m);
  m.dtype == DType::bf16 ? mend_slice<c10::BFloat16>(m) : mend_slice<float>(m);
}

void finish(const SliceMend& m, const SliceStates& s) {
  states(s);
  SliceMend mended = m;
  mended.state = s.entered, mended.came = s.came;
  mend(mended);
}

void finish_gradients(const SliceMend& m, const SliceGradients& s) {
  gradients(s);
  SliceMend mended = m;
  mended.state = s.left;
  mend(mended);
}

constexpr SliceKernels kKernels{message, states, gradients, mend, finish, finish_gradients};

}  // namespace

TORCH_LIBRARY_IMPL(weft, CPU, m) {
  m.impl("slice_message", [](const at::Tensor& A, const at::Tensor& value, bool leaves) {
    return slice_message(kKernels, A, value, leaves);
  });
  m.impl("slice_states",
         [](const at::Tensor& messages, const at::Tensor& value, int64_t order, bool reverse, int64_t matrices,
            bool shares) { return slice_states(kKernels, messages, value, order, reverse, matrices, shares); });
  m.impl("slice_left", [](const at::Tensor& messages, const at::Tensor& products, int64_t order, bool reverse) {
    return slice_left(kKernels, messages, products, order, reverse);
  });
  m.impl("slice_mend_",
         [](const at::Tensor& x, const at::Tensor& A, const at::Tensor& state, const std::optional<at::Tensor>& came,
            bool reverse) { slice_mend(kKernels, x, A, state, came, reverse); });
  m.impl("slice_mend_gradients_",
         [](const at::Tensor& grad_b, const std::optional<at::Tensor>& grad_A, const at::Tensor& A,
            const std::optional<at::Tensor>& x, const std::optional<at::Tensor>& first, const at::Tensor& state,
            bool reverse) { slice_mend_gradients(kKernels, grad_b, grad_A, A, x, first, state, reverse); });
  m.impl("slice_finish_", [](const at::Tensor& x, const at::Tensor& A, const at::Tensor& messages, int64_t order,
                             bool reverse) { return slice_finish(kKernels, x, A, messages, order, reverse); });
  m.impl("slice_finish_gradients_",
         [](const at::Tensor& grad_b, const std::optional<at::Tensor>& grad_A, const at::Tensor& A, const at::Tensor& x,
            const std::optional<at::Tensor>& start, const at::Tensor& messages, const at::Tensor& products,
            int64_t order, bool reverse) {
           return slice_finish_gradients(kKernels, grad_b, grad_A, A, x, start, messages, products, order, reverse);
         });
}

}  // namespace weft::scan
