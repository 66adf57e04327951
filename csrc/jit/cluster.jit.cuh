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
  asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// Shared-window address of the same variable in the block of another rank.
__device__ inline unsigned shared_address(unsigned own_address, unsigned of_rank) {
#if __CUDA_ARCH__ >= 900
  unsigned address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(own_address), "r"(of_rank));
  return address;
#else
  return own_address;
#endif
}
__device__ inline unsigned shared_address(const void* shared, unsigned of_rank) {
  return shared_address(static_cast<unsigned>(__cvta_generic_to_shared(shared)), of_rank);
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

#if __CUDA_ARCH__ >= 900
// A barrier in shared memory (mbarrier, 8 bytes) whose phase ends when one thread has said how many bytes to expect and
// as many have been sent.
__device__ inline void arrivals_init(unsigned barrier) {
  asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(barrier) : "memory");
}
__device__ inline void arrivals_expect(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Waits for the phase of this parity; what was sent in it is seen after.
__device__ inline void arrivals_wait(unsigned barrier, unsigned parity) {
  asm volatile(
      "{\n\t.reg .pred done;\n"
      "WAIT:\n\tmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n\t@done bra DONE;\n\tbra "
      "WAIT;\n"
      "DONE:\n\t}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Stores 16 bytes in another block, and tells its barrier when they are there. Both addresses are of that block.
__device__ inline void send(unsigned address, uint4 v, unsigned barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier)
      : "memory");
}
#endif

}  // namespace weft::cluster
