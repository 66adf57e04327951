// Thread block clusters in PTX, for NVRTC, which finds no cooperative_groups.h. Below compute capability 9.0 a cluster
// is one block.
#pragma once

namespace weft::cluster {

// The block's index in its cluster.
__device__ inline unsigned rank() {
  unsigned value = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(value));
#endif
  return value;
}

// Blocks of a cluster.
__device__ inline unsigned size() {
  unsigned value = 1;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(value));
#endif
  return value;
}

// All threads of all blocks meet; what they wrote before, to shared memory of any block too, is seen after.
__device__ inline void barrier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// Shared-window address of the same variable in the block of another rank.
__device__ inline unsigned shared_address(const void* shared, unsigned of_rank) {
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(of_rank));
#endif
  return address;
}

// Reads 32 bits at such an address.
__device__ inline unsigned load(unsigned address) {
  unsigned value;
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
#else
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
#endif
  return value;
}

}  // namespace weft::cluster
