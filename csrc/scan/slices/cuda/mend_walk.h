// Mending where there are channels enough: each has a lane that walks, as the scan itself (mend_walk.cuh).
#pragma once
#include <cuda_runtime_api.h>

#include <type_traits>

#include "scan/slices/slice_args.h"

namespace weft::scan {

// What tells, if anything does, what comes into a slice's channels.
template <bool kGradients>
using Between = std::conditional_t<kGradients, SliceGradients, SliceStates>;

// The one of `states` and `gradients` that m asks for has messages, or m.state is what comes in. False, and nothing
// done, where channels are too few or do not lie at multiples of 16 bytes.
bool mend_by_walk(const SliceMend& m, const SliceStates& states, const SliceGradients& gradients, cudaStream_t stream);

}  // namespace weft::scan
