// Asynchronous copies from global to shared memory (cp.async), in the groups of one thread. Loads into registers cannot
// run as far ahead: a warp has six scoreboards, and waiting for one load then waits for younger ones too.
#pragma once
#include <cstdint>

namespace weft {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return uint32_t(__cvta_generic_to_shared(p));
}

// 4, 8 or 16 bytes; both ends aligned to as many.
template <int kBytes>
__device__ __forceinline__ void copy_async(void* to, const void* from) {
  const uint32_t address = shared_address(to);
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(from), "n"(kBytes) : "memory");
  }
}

// 16 bytes, of which the last 16 - `bytes` are zeros that are not read.
__device__ __forceinline__ void copy_async_padded(void* to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace weft
