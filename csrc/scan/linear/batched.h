// The dense linear scan of any H by batched matrix products, for H above what the kernels take.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "common/costs.h"

namespace weft::scan {

// A: (T, B, H, H), or (T, 1, H, H) shared by the batch; b: (T, B, H); x0: (B, H) or nothing for zeros, A[0] (with
// `reverse` A[T-1]) is then not read. Checked by the caller. Returns x (T, B, H), contiguous, in b's dtype. Any device,
// no host synchronisation. A scan costs H times the arithmetic of the steps, in fp64, so it can pay only where the
// steps are bound by launches: small B, long T, H of a few hundred. Elsewhere, and always for fp64, this runs step by
// step. `costs` is the device's table scan.linear_batched.
at::Tensor linear_scan_batched(const at::Tensor& A, const at::Tensor& b, const std::optional<at::Tensor>& x0,
                               bool reverse, bool transpose, const costs::Table& costs);

}  // namespace weft::scan
