// The CPU kernels of weft::scan_rnn: included once per instruction set, with the macros of common/cpu/simd-inl.h, whose
// rule on the standard library's templates holds here, too.
#include "common/cpu/simd-inl.h"
#include "scan/cpu/cell-inl.h"
#include "scan/cpu/scan_rnn_kernels.h"

namespace weft::cpu::WEFT_ISA {
namespace {

// ---- The recurrent product
// -------------------------------------------------------------------------------------------
//
// Packed weights: the H columns of a result are cut into panels of kLanes; up to kMaxPanels of them form a group whose
// NV = panels * blocks vectors are produced together: [group][depth][panel][block][lane], zero beyond H.

constexpr int max_panels(int blocks) {
  return blocks == 1 ? 3 : 1;
}

// Calls f.template operator()<panels>(first_panel) for each group of panels.
template <int BLOCKS, typename F>
WEFT_INLINE void panel_groups(int64_t panels, F f) {
  constexpr int kMax = max_panels(BLOCKS);
  int64_t first = 0;
  for (; first + kMax <= panels; first += kMax) f.template operator()<kMax>(first);
  if constexpr (kMax > 1) {
    if (panels - first == 2) f.template operator()<2>(first);
    if (panels - first == 1) f.template operator()<1>(first);
  }
}

template <typename T>
int64_t packed_size(int blocks, int64_t H, int64_t depth) {
  return panels_of<T>(H) * blocks * depth * Simd<T>::kLanes;
}

// Element (k, block, column) of the matrix to pack is w[k * depth_stride + (block * H + column) * column_stride].
template <typename T, int BLOCKS>
void pack(const T* w, int64_t depth_stride, int64_t column_stride, int64_t H, int64_t depth, T* packed) {
  constexpr int kLanes = Simd<T>::kLanes;
  panel_groups<BLOCKS>(panels_of<T>(H), [&]<int NP>(int64_t panel) {
    for (int64_t k = 0; k < depth; ++k) {
      for (int p = 0; p < NP; ++p) {
        for (int g = 0; g < BLOCKS; ++g) {
          for (int lane = 0; lane < kLanes; ++lane) {
            const int64_t column = (panel + p) * kLanes + lane;
            *packed++ = column < H ? w[k * depth_stride + (g * H + column) * column_stride] : T(0);
          }
        }
      }
    }
  });
}

template <typename T>
void pack_forward(Cell cell, const T* w, int64_t H, int64_t depth, T* packed) {
  switch (gate_blocks(cell)) {
    case 1:
      return pack<T, 1>(w, 1, depth, H, depth, packed);
    case 3:
      return pack<T, 3>(w, 1, depth, H, depth, packed);
    default:
      return pack<T, 4>(w, 1, depth, H, depth, packed);
  }
}

template <typename T>
void pack_backward(const T* w, int64_t H, int64_t depth, T* packed) {
  pack<T, 1>(w, H, 1, H, depth, packed);
}

template <typename T>
void pad_bias(int blocks, const T* bias, int64_t H, T* padded) {
  for (int64_t panel = 0; panel < panels_of<T>(H); ++panel) {
    for (int g = 0; g < blocks; ++g) {
      for (int lane = 0; lane < Simd<T>::kLanes; ++lane) {
        const int64_t column = panel * Simd<T>::kLanes + lane;
        *padded++ = bias != nullptr && column < H ? bias[g * H + column] : T(0);
      }
    }
  }
}

// ---- Forward
// ---------------------------------------------------------------------------------------------------------

// Steps whose input projection is computed at once: enough rows for the micro-kernel, few enough to stay in L2.
template <typename T>
WEFT_INLINE int64_t chunk_steps(const ScanRnnForwardArgs<T>& a, int64_t rows) {
  const int64_t step = rows * gate_blocks(a.cell) * panels_of<T>(a.H) * Simd<T>::kLanes;
  const int64_t fit = step > 0 ? int64_t(131072 / sizeof(T)) / step : 1;
  return smaller(a.steps, fit < 8 ? 8 : fit / 8 * 8);
}

template <typename T>
int64_t forward_scratch(const ScanRnnForwardArgs<T>& a, int64_t rows) {
  const int64_t width = panels_of<T>(a.H) * Simd<T>::kLanes;
  return rows * width * (3 + chunk_steps(a, rows) * gate_blocks(a.cell));
}

template <typename T, Cell C>
void forward(const ScanRnnForwardArgs<T>& a, int64_t b0, int64_t b1, T* scratch) {
  using S = Simd<T>;
  using Vec = typename S::Vec;
  constexpr int G = gate_blocks(C);
  constexpr int kLanes = S::kLanes;
  const int64_t rows = b1 - b0, H = a.H, panels = panels_of<T>(H), width = panels * kLanes,
                chunk = chunk_steps(a, rows);
  T* h = scratch;                      // (rows, width): state before the step
  T* h_next = h + rows * width;        // (rows, width): state after it; apart, because all of h is read for each panel
  T* const c = h_next + rows * width;  // (rows, width): lstm's cell state
  T* const projected = c + rows * width;  // (chunk, rows, panels, G, lanes): W_ih x + bias
  fill_zero(scratch, 3 * rows * width);
  copy_rows(a.h0 + b0 * H, H, h, width, rows, H);
  if constexpr (C == Cell::kLstm) copy_rows(a.c0 + b0 * H, H, c, width, rows, H);

  for (int64_t chunk_start = 0; chunk_start < a.steps; chunk_start += chunk) {
    const int64_t chunk_end = smaller(chunk_start + chunk, a.steps);
    auto time_of = [&](int64_t step) { return a.reverse ? a.steps - 1 - step : step; };

    // Blocks of rows here are steps of one sequence, so that a batch of one row fills the register block, too.
    panel_groups<G>(panels, [&]<int NP>(int64_t panel) {
      constexpr int NV = NP * G;
      const T* w = a.w_ih + panel * G * kLanes * a.I;
      const T* bias = a.bias + panel * G * kLanes;
      auto start = [&](int, int v) { return S::load(bias + v * kLanes); };
      for (int64_t r = 0; r < rows; ++r) {
        row_blocks<max_rows(NV)>(chunk_end - chunk_start, [&]<int MR>(int64_t step) {
          const T* x = a.input + (time_of(chunk_start + step) * a.B + b0 + r) * a.I;
          T* out = projected + (step * rows + r) * width * G + panel * G * kLanes;
          product<T, MR, NV>(x, a.reverse ? -a.B * a.I : a.B * a.I, a.I, 0, 0, w, start, out, rows * width * G);
        });
      }
    });

    for (int64_t step = chunk_start; step < chunk_end; ++step) {
      const int64_t t = time_of(step);
      panel_groups<G>(panels, [&]<int NP>(int64_t panel) {
        constexpr int NV = NP * G;
        const T* w = a.w_hh + panel * G * kLanes * H;
        row_blocks<max_rows(NV)>(rows, [&]<int MR>(int64_t first) {
          const T* x = projected + ((step - chunk_start) * rows + first) * width * G + panel * G * kLanes;
          alignas(64) T pre[MR * NV * kLanes];
          auto start = [&](int r, int v) {
            // r multiplies gru's W_hn h + b_hn before the input side is added, so that product starts from b_hn.
            if (C == Cell::kGru && v == 2) return S::load(a.bias_m + panel * kLanes);
            return S::load(x + r * width * G + v * kLanes);
          };
          product<T, MR, NV>(h + first * width, width, H, 0, 0, w, start, pre, NV * kLanes);

#pragma GCC unroll 1
          for (int r = 0; r < MR; ++r) {
            const int64_t row = t * a.B + b0 + first + r;
            for (int p = 0; p < NP; ++p) {
              const int64_t j = (panel + p) * kLanes, lanes = H - j;
              const T* gate = pre + (r * NV + p * G) * kLanes;
              T* const state = h_next + (first + r) * width + j;
              T* const cell = c + (first + r) * width + j;
              const Vec next =
                  cell_forward<T, C>(gate, x + r * width * G + 2 * kLanes, h + (first + r) * width + j, cell,
                                     a.gates == nullptr ? nullptr : a.gates + row * 4 * H + j, H, lanes);
              if (C == Cell::kLstm && a.gates != nullptr) S::store(a.cells + row * H + j, S::load(cell), lanes);
              S::store(state, next);
              S::store(a.output + row * H + j, next, lanes);
            }
          }
        });
      });
      T* const last = h;
      h = h_next;
      h_next = last;
    }
  }
  copy_rows(h, width, a.h_n + b0 * H, H, rows, H);
  if constexpr (C == Cell::kLstm) copy_rows(c, width, a.c_n + b0 * H, H, rows, H);
}

template <typename T>
void forward(const ScanRnnForwardArgs<T>& a, int64_t b0, int64_t b1, T* scratch) {
  switch (a.cell) {
    case Cell::kRnnTanh:
      return forward<T, Cell::kRnnTanh>(a, b0, b1, scratch);
    case Cell::kRnnRelu:
      return forward<T, Cell::kRnnRelu>(a, b0, b1, scratch);
    case Cell::kGru:
      return forward<T, Cell::kGru>(a, b0, b1, scratch);
    case Cell::kLstm:
      return forward<T, Cell::kLstm>(a, b0, b1, scratch);
  }
}

// ---- Backward
// --------------------------------------------------------------------------------------------------------
//
// Sequential: on a CPU a scan would do H times the work for a parallelism that the batch already has. A step first
// turns the gradient of the state into the gradients before the nonlinearities (dgates) and then multiplies those by
// W_hh.

template <typename T>
int64_t backward_scratch(const ScanRnnBackwardArgs<T>& a, int64_t rows) {
  return 2 * rows * panels_of<T>(a.H) * Simd<T>::kLanes;
}

template <typename T, Cell C>
void backward(const ScanRnnBackwardArgs<T>& a, int64_t b0, int64_t b1, T* scratch) {
  using S = Simd<T>;
  using Vec = typename S::Vec;
  constexpr int K = chain_blocks(C);
  constexpr int kLanes = S::kLanes;
  const int64_t rows = b1 - b0, H = a.H, panels = panels_of<T>(H), width = panels * kLanes;
  T* const dh = scratch;            // (rows, width): what has arrived at the state from later steps
  T* const dc = dh + rows * width;  // (rows, width): the same for lstm's cell state
  fill_zero(scratch, 2 * rows * width);
  if (a.grad_h_n != nullptr) copy_rows(a.grad_h_n + b0 * H, H, dh, width, rows, H);
  if (a.grad_c_n != nullptr) copy_rows(a.grad_c_n + b0 * H, H, dc, width, rows, H);

  for (int64_t step = a.steps - 1; step >= 0; --step) {
    const int64_t t = a.reverse ? a.steps - 1 - step : step;
    const int64_t t_before = a.reverse ? t + 1 : t - 1;
    const T* const h_before = step > 0 ? a.output + t_before * a.B * H : a.h0;
    const T* const c_before = step > 0 ? a.cells + t_before * a.B * H : a.c0;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t b = b0 + r, row = t * a.B + b;
      for (int64_t panel = 0; panel < panels; ++panel) {
        const int64_t j = panel * kLanes, lanes = H - j;
        T* const carried = dh + r * width + j;
        T* const d = a.dgates + row * K * H + j;
        Vec grad = S::load(carried);
        if (a.grad_output != nullptr) grad += S::load(a.grad_output + row * H + j, lanes);
        const T* const state_before = C == Cell::kGru ? h_before : C == Cell::kLstm ? c_before : nullptr;
        const CellGrads<T, C> grads =
            cell_backward<T, C>(grad, a.output + row * H + j, a.gates + row * 4 * H + j, H,
                                state_before != nullptr ? S::load(state_before + b * H + j, lanes) : Vec{},
                                a.cells + row * H + j, nullptr, carried, dc + r * width + j, lanes);
        for (int block = 0; block < K; ++block) S::store(d + block * H, grads.d[block], lanes);
      }
    }

    panel_groups<1>(panels, [&]<int NP>(int64_t panel) {
      const T* w = a.w_hh + panel * kLanes * gate_blocks(C) * H;
      row_blocks<max_rows(NP)>(rows, [&]<int MR>(int64_t first) {
        const T* d = a.dgates + (t * a.B + b0 + first) * K * H;
        T* const to = dh + first * width + panel * kLanes;
        auto start = [&](int, int) { return Vec{}; };
        if constexpr (C == Cell::kGru) {
          product<T, MR, NP, true>(d, K * H, 2 * H, 3 * H, H, w, start, to, width);  // dr, dz and, past dn, dm
        } else {
          product<T, MR, NP>(d, K * H, K * H, 0, 0, w, start, to, width);
        }
      });
    });
  }
  copy_rows(dh, width, a.grad_h0 + b0 * H, H, rows, H);
  if constexpr (C == Cell::kLstm) copy_rows(dc, width, a.grad_c0 + b0 * H, H, rows, H);
}

template <typename T>
void backward(const ScanRnnBackwardArgs<T>& a, int64_t b0, int64_t b1, T* scratch) {
  switch (a.cell) {
    case Cell::kRnnTanh:
      return backward<T, Cell::kRnnTanh>(a, b0, b1, scratch);
    case Cell::kRnnRelu:
      return backward<T, Cell::kRnnRelu>(a, b0, b1, scratch);
    case Cell::kGru:
      return backward<T, Cell::kGru>(a, b0, b1, scratch);
    case Cell::kLstm:
      return backward<T, Cell::kLstm>(a, b0, b1, scratch);
  }
}

template <typename T>
constexpr ScanRnnKernels<T> kKernels = {packed_size<T>,     pack_forward<T>,     pack_backward<T>, pad_bias<T>,
                                        forward_scratch<T>, backward_scratch<T>, forward<T>,       backward<T>};

constexpr ScanRnnTables kTables = {kKernels<float>, kKernels<double>};

}  // namespace
}  // namespace weft::cpu::WEFT_ISA
