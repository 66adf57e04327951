// scan_cell(input, h, weights, *, cell) -> (output, h_next)
//
// One step of a layer of weft.nn that is linear in its state: products, gates and the new state, for decoding, where a
// step's time is the host's. The formulas are those of python/weft/_scan/layers.py, whose scan runs many steps.
//
// input   (B, X)
// h       (B, N), the state before, or none for zeros
// weights by `cell`
//         min_gru, min_gru_g    weight (2 H, X), bias (2 H) or none; _g: with the candidate's activation g
//         min_lstm, min_lstm_g  weight (3 H, X), bias (3 H) or none
//         rg_lru                weight (blocks, 2 H / blocks, H / blocks), gate_bias (blocks, 2 H / blocks) or none,
//                               Lambda (H), projection (H, X) or none, its bias (H) or none
//         lru                   nu_log, theta_log, gamma_log (N), B (N, 2, X), C (H, N, 2), D (H), (H, X) or none
//         s5                    Lambda_re, Lambda_im, log_step (N), then as lru
// output  (B, H), in the dtype of the products; h_next (B, N), in that of the state: of rg_lru at least float32, of lru
//         and s5 complex, else the output's. For min_gru and min_lstm it is the output.
//
// Made of ATen operations, which bring devices, gradients of any order, autocast and vmap. Errors: TypeError where h
// has not the dtype of the state, outside of autocast; ValueError for an unknown cell and a number of weights; ATen's
// own.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

namespace weft::scan::cell {

std::tuple<at::Tensor, at::Tensor> scan_cell(const at::Tensor& input, const std::optional<at::Tensor>& h,
                                             const c10::List<std::optional<at::Tensor>>& weights,
                                             std::string_view cell);

}  // namespace weft::scan::cell
