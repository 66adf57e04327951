// Boxes of tensors that Hopper's copy engine brings to shared memory, whose barriers are the mbarriers of ptx.jit.cuh,
// and what roles of a block that work on them meet at, in PTX. tests/emulator has the same names for a processor. Below
// compute capability 9.0 nothing is copied: code for older devices, which newer ones may be given, never asks for it.
#pragma once
#include "common/cuda/ptx.jit.cuh"

namespace weft {

// A tensor of three dimensions as the copy engine knows it, made by the host (tensor_map.h).
struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

// Copies a box that begins at these coordinates; zeros where there is no tensor. The map lies in a kernel's constant
// parameters, `to` at a multiple of 128.
__device__ __forceinline__ void copy_box(u32 to, const TensorMap& map, int x, int y, int z, u32 barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
#endif
}

// Barriers of the block that some threads wait at and others only pass: all `threads` of them have to come, whole
// warps.
__device__ __forceinline__ void barrier_sync(int barrier, int threads) {
  __syncwarp();
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void barrier_arrive(int barrier, int threads) {
  __syncwarp();
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace weft
