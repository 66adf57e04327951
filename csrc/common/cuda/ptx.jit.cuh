// What kernels say in PTX, for nvcc and for NVRTC, which finds no header: conversions, shared memory, asynchronous
// copies, barriers, clusters, memory that blocks share, products on the tensor cores. tests/emulator has the same names
// for a processor.
//
// Addresses in shared memory are 32 bits wide, those of another block of the cluster included. What needs compute
// capability 9.0 is empty below it: code for older devices, which newer ones may be given, never calls it.
#pragma once

namespace weft {

using u32 = unsigned int;
using u64 = unsigned long long;

// ---------------------------------------------------------------------------------------------------- arithmetic
// The half types as NVRTC has them, by their bits.
__device__ __forceinline__ float half_to_float(unsigned short x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
__device__ __forceinline__ unsigned short float_to_half(float x) {
  unsigned short y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float bfloat16_to_float(unsigned short x) {
  return __uint_as_float(u32(x) << 16);
}
__device__ __forceinline__ unsigned short float_to_bfloat16(float x) {
  unsigned short y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// -------------------------------------------------------------------------------------------------- shared memory
// What the launch gives the block.
__device__ __forceinline__ unsigned char* dynamic_shared_memory() {
  extern __shared__ __align__(128) unsigned char dynamic_shared[];
  return dynamic_shared;
}
__device__ __forceinline__ u32 shared_address(const void* p) {
  return u32(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ uint4 load_shared(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
__device__ __forceinline__ void store_shared(u32 address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// Four 8 x 8 matrices of 16-bit elements, of which lane i has the address of row i % 8 of matrix i / 8: the lane gets
// elements 2 (lane % 4) and the next of row lane / 4 of each; kTransposed: of its transpose.
template <bool kTransposed>
__device__ __forceinline__ void load_matrices(u32 address, u32& a, u32& b, u32& c, u32& d) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                 : "r"(address)
                 : "memory");
  }
}

// ---------------------------------------------------------------------------------------------- threads of a block
// kThreads of them, whole warps, meet; 0 is the barrier of __syncthreads.
template <int kBarrier, int kThreads>
__device__ __forceinline__ void named_barrier() {
  asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}
// All of them meet, from different places of the program, which __syncthreads does not allow.
template <int kBarrier>
__device__ __forceinline__ void sync_from_anywhere() {
  asm volatile("barrier.sync %0, %1;" ::"n"(kBarrier), "r"(blockDim.x) : "memory");
}

// ------------------------------------------------------------------------------------------------------- cp.async
// Asynchronous copies from global to shared memory, in the groups of one thread. Loads into registers cannot run as far
// ahead: a warp has six scoreboards, and waiting for one load then waits for younger ones too.
//
// 4, 8 or 16 bytes; both ends aligned to as many.
template <int kBytes>
__device__ __forceinline__ void copy_async(void* to, const void* from) {
  const u32 address = shared_address(to);
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
// Until at most kPending of the latest groups are under way.
template <int kPending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ------------------------------------------------------------------------------------------------------- mbarrier
// A barrier in shared memory (8 bytes) whose phase ends when one thread has said how many bytes to expect and as many
// have come, by bulk copies or from other blocks.
__device__ __forceinline__ void mbarrier_init(u32 barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
#endif
}
// Its memory may be used for something else.
__device__ __forceinline__ void mbarrier_invalidate(u32 barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
#endif
}
// Makes what this thread has initialised known to the copy engine and to the cluster.
__device__ __forceinline__ void mbarrier_publish() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
__device__ __forceinline__ void mbarrier_expect(u32 barrier, u32 bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}
// Waits for the phase of this parity; what has come in it is seen after. kFromCluster: from other blocks.
template <bool kFromCluster = false>
__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
#if __CUDA_ARCH__ >= 900
  if constexpr (kFromCluster) {
    asm volatile(
        "{\n\t.reg .pred done;\n"
        "WAIT:\n\tmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n\t@done bra DONE;\n\tbra "
        "WAIT;\n"
        "DONE:\n\t}" ::"r"(barrier),
        "r"(parity)
        : "memory");
  } else {
    u32 done = 0;
    while (!done) {
      asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                   : "=r"(done)
                   : "r"(barrier), "r"(parity)
                   : "memory");
    }
  }
#endif
}

// --------------------------------------------------------------------------------------------------- cp.async.bulk
// Hopper's copy engine: one thread asks for a whole block of memory, both ends and the size multiples of 16 bytes, and
// the barrier counts what has come.
__device__ __forceinline__ void copy_bulk(u32 to, const void* from, int bytes, u32 barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
#endif
}
// Orders what this thread has done in shared memory before what the copy engine does there.
__device__ __forceinline__ void fence_copy_engine() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// ------------------------------------------------------------------------------------------------- blocks of a grid
// Global memory that other blocks write while this kernel runs.
__device__ __forceinline__ uint4 load_relaxed(const void* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
__device__ __forceinline__ void store_relaxed(void* p, uint4 v) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ void prefetch_l2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// The compiler works x out here, not where it is needed first.
__device__ __forceinline__ void pin(int& x) {
  asm volatile("" : "+r"(x));
}

// ---------------------------------------------------------------------------------------------- blocks of a cluster
// Below compute capability 9.0 a cluster is one block.
namespace cluster {

// The block's index in its cluster.
__device__ __forceinline__ u32 rank() {
  u32 value = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(value));
#endif
  return value;
}

// Blocks of a cluster.
__device__ __forceinline__ u32 size() {
  u32 value = 1;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(value));
#endif
  return value;
}

// All threads of all blocks meet; what they wrote before, to shared memory of any block too, is seen after.
__device__ __forceinline__ void barrier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// Address of the same variable in the block of another rank.
__device__ __forceinline__ u32 address_in(u32 of_rank, u32 own_address) {
#if __CUDA_ARCH__ >= 900
  u32 address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(own_address), "r"(of_rank));
  return address;
#else
  return own_address;
#endif
}

// Reads 32 bits at such an address.
__device__ __forceinline__ u32 load(u32 address) {
  u32 value;
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
#else
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
#endif
  return value;
}

// Stores 16 bytes in another block, and tells its barrier when they are there. Both addresses are of that block.
__device__ __forceinline__ void send(u32 address, uint4 v, u32 barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier)
      : "memory");
#endif
}

}  // namespace cluster

// ---------------------------------------------------------------------------------------------------- tensor cores
// d += a b in fp32. Lane l has of d (16 x 8) rows l / 4 and 8 more, columns 2 (l % 4) and the next; of a (16 x k) the
// same rows, of b (k x 8) column l / 4; the elements of a 32-bit register are neighbours along k.
//
// k = 16.
__device__ __forceinline__ void mma_f16(float (&d)[4], const u32* a, const u32* b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_bf16(float (&d)[4], const u32* a, const u32* b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// k = 8.
__device__ __forceinline__ void mma_tf32(float (&d)[4], const u32* a, const u32* b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// k = 4, with two registers of a and one of b.
__device__ __forceinline__ void mma_half_tf32(float (&d)[4], const u32* a, const u32* b) {
  asm("mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b[0]));
}

// The tensor cores cut a float to TF32's 11 significant bits; this rounds to nearest.
__device__ __forceinline__ u32 round_tf32(u32 x) {
  u32 y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(__uint_as_float(x)));
  return y;
}

// Products of fp32 accuracy by three of TF32: x = high + low, x y = high high + (high low + low high). high is rounded
// to nearest; the tensor core cuts low to its first 11 bits, so 22 remain. An inf or NaN survives in low.
__device__ __forceinline__ void split_tf32(float x, u32& high, u32& low) {
  // In two integer instructions: the one that converts made the products of a scan a fifth slower.
  high = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
  low = __float_as_uint(x - __uint_as_float(high));
}

// The same where both operands are split at every step, in one instruction less: high is cut off, and of an infinity
// low is nothing, where the difference would be NaN. Infinite times the low part of a number that has none is still
// NaN.
__device__ __forceinline__ u32 cut_tf32(u32 x) {
  return x & 0xffffe000u;
}
__device__ __forceinline__ u32 cut_off_tf32(u32 x) {
  const u32 rest = __float_as_uint(__uint_as_float(x) - __uint_as_float(cut_tf32(x)));
  return (x & 0x7fffffffu) == 0x7f800000u ? 0u : rest;
}

// Products of fp32 accuracy by six of bf16, of which three numbers sum up to x: takes the first of x and y (x in the
// lower half) and leaves their rests, which are exact.
__device__ __forceinline__ u32 take_bf16(float& x, float& y) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
  x -= __uint_as_float(pair << 16);
  y -= __uint_as_float(pair & 0xffff0000u);
  return pair;
}

}  // namespace weft
