// Launchers of run-length coding on raw pointers and a stream. They start from or produce the mask of zero-value
// compression. Torch-free, no host synchronisation.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace weft::offload {

// Runs of the n elements of a mask: `runs` has room for n + 1, the rest of which becomes 0; runs_used is one number.
struct RleRuns {
  const uint32_t* mask;
  int64_t n;
  int32_t* runs;
  int64_t* runs_used;
};
size_t rle_runs_workspace(const RleRuns& args);  // bytes
void rle_runs(const RleRuns& args, void* workspace, cudaStream_t stream);

// The mask of n elements from `count` runs. Invalid runs give an unspecified mask.
struct RleMask {
  const int32_t* runs;
  int64_t count;
  uint32_t* mask;
  int64_t n;
};
size_t rle_mask_workspace(const RleMask& args);
void rle_mask(const RleMask& args, void* workspace, cudaStream_t stream);

}  // namespace weft::offload
