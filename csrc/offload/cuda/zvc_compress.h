// Launchers of zero-value compression on raw pointers and a stream: for the operators and for the transfers.
// Torch-free, no host synchronisation, safe under stream capture.
//
// Pointers may be device memory or mapped host memory, except the mask to decompress, which is read twice, and the
// workspaces: these must be on the device. `blocks` is the most thread blocks that run at a time, 0 for as many as fill
// the device; a few fill the bus to mapped host memory, and more only slow the compute beside them. Blocks never wait
// for one that is not resident, so any number is safe beside other kernels.
//
// Errors: std::runtime_error naming the kernel.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "common/integers.h"

namespace weft::offload {

struct ZvcCompress {
  const void* x;  // n elements, aligned to their size; 16 bytes are faster
  int64_t n;
  int itemsize;      // 2 or 4
  uint32_t* mask;    // ceil(n/32) words, all written
  void* values;      // 4-byte aligned; may lie right behind the mask
  int64_t capacity;  // elements that `values` holds; those beyond are counted
  int64_t* size;     // elements that are not zero
  // Room for n values, as aligned, of which those behind `capacity` are written; or null.
  void* all = nullptr;
};
constexpr int64_t zvc_mask_bytes(int64_t n) {
  return 4 * ceil_div(n, 32);
}
size_t zvc_compress_workspace(const ZvcCompress& args);  // bytes, aligned to 16; free when the launch has run
void zvc_compress(const ZvcCompress& args, void* workspace, int blocks, cudaStream_t stream);

struct ZvcDecompress {
  const uint32_t* mask;
  const void* values;  // aligned to an element
  int64_t available;   // elements that `values` holds: nothing is read outside
  void* out;           // n elements, aligned to their size; 16 bytes are faster
  int64_t n;
  int itemsize;  // 2 or 4
  // All values, of which those behind `available` are read, slowly where it is not aligned as `values`; or null: what
  // is missing becomes 0.
  const void* all = nullptr;
};
size_t zvc_decompress_workspace(const ZvcDecompress& args);
void zvc_decompress(const ZvcDecompress& args, void* workspace, int blocks, cudaStream_t stream);

}  // namespace weft::offload
