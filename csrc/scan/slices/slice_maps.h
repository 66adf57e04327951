// The scan of a slice of a dense linear_scan whose whole lies on many ranks, in two halves with the exchange between
// them, so that no pass over the steps is added.
//
// slice_maps(A, b, x0, chunks, reverse, transpose, told) -> (maps, value, message)
//   A        (T, B, H, H), or (T, 1, H, H), shared by the batch; b (T, B, H); float32, on CUDA H 2 to 32; T at least 1;
//            any strides
//   x0       (B, H), what the caller knows of the state before the slice; none: nothing yet, and A of the first step is
//            not read for the value
//   chunks   of time, 1 to T: slice_chunks says how many are fastest
//   value    (B, H), what leaves the slice from x0
//   message  with `told` what the rank tells the others, as slice_message: the packed product of all A, (B, H, H) or
//   (1,
//            H, H), the bits of value, and 1; else (0)
//   maps     what slice_replay_ goes by: on CUDA (chunks, B, slice_map_floats(H)), on the CPU (chunks, B, 0)
// slice_replay_(x, A, b, maps, state, came, chunks, reverse, transpose)
//   x        (T, B, H), unit stride in h, overlaps nothing else: becomes the scan from `state` (B, H), or where `came`
//            (1), int32, is 0, from nothing, without the first A
//   maps     of slice_maps with the same other arguments; they are used up
//
// The product is that of the chunks' maps: float32's digits in each column, and double's range and more. What becomes
// of a state that comes in is what the steps make of it from the seam on: where maps say less than steps would, steps
// are taken. Deterministic; batch rows are independent. No autograd of their own: weft::slice_scan, which calls them,
// has it. Source: BPPSA (Wang, Bai, Pekhimenko, MLSys 2020), section 3, cut by devices.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "scan/linear/linear_scan.h"
#include "scan/slices/slice_args.h"

namespace weft::scan {

// What a device runs. None of the sizes is 0.
struct SliceHalves {
  int64_t (*map_floats)(int64_t H);
  // Of the maps, the value and, where it has numbers, the message.
  void (*maps)(const Problem& problem, int64_t chunks, const at::Tensor& maps, const at::Tensor& value,
               const at::Tensor& message);
  // Into x, from problem.x0, which is there.
  void (*replay)(const Problem& problem, int64_t chunks, const at::Tensor& maps, const int32_t* came,
                 const at::Tensor& x);
};

using Maps = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
Maps slice_maps(const SliceHalves& halves, const at::Tensor& A, const at::Tensor& b,
                const std::optional<at::Tensor>& x0, int64_t chunks, bool reverse, bool transpose, bool told);
void slice_replay(const SliceHalves& halves, const at::Tensor& x, const at::Tensor& A, const at::Tensor& b,
                  const at::Tensor& maps, const at::Tensor& state, const std::optional<at::Tensor>& came,
                  int64_t chunks, bool reverse, bool transpose);

}  // namespace weft::scan
