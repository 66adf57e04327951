// Products of four neighbouring warps, whose factors lie in shared memory, on the tensor cores of compute
// capability 9.0 alone. tests/emulator has the same names for a processor.
#pragma once

#include "common/cuda/ptx.jit.cuh"

namespace weft {

// A factor is made of pieces of 8 of its rows (of the right one, of its columns) by 8 neighbours of the inner
// dimension, 128 bytes each: where the first is, and how far it is, in bytes, to the next along the inner dimension and
// along the rows.
__device__ __forceinline__ u64 warpgroup_factor(u32 address, u32 inner_apart, u32 rows_apart) {
  return u64(address >> 4) | u64(inner_apart >> 4) << 16 | u64(rows_apart >> 4) << 32;
}
// All threads of a warpgroup meet; a block has them from its first thread on, 15 at most.
__device__ __forceinline__ void warpgroup_barrier() {
  asm volatile("bar.sync %0, 128;" ::"r"(1 + threadIdx.x / 128) : "memory");
}
// After this warpgroup's earlier accesses to the sums, and to a factor in registers.
__device__ __forceinline__ void warpgroup_begin() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void warpgroup_commit() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Until all that was committed is done; the sums of it are seen from here on.
template <int kSums>
__device__ __forceinline__ void warpgroup_wait(float (&d)[kSums]) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int i = 0; i < kSums; ++i) asm volatile("" : "+f"(d[i])::"memory");
#endif
}
// d (64 x 128) = left (64 x 16) @ right (16 x 128), added to it where `more`: of warp w and lane l, d[4 n + i] is in
// row 16 w + l / 4 + 8 (i / 2) and column 8 n + 2 (l % 4) + i % 2.
__device__ __forceinline__ void warpgroup_mma_bf16(float (&d)[64], u64 left, u64 right, bool more) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile(
      "{ .reg .pred more; setp.ne.b32 more, %66, 0;"
      " wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"
      " {%0, %1, %2, %3, %4, %5, %6, %7,"
      " %8, %9, %10, %11, %12, %13, %14, %15,"
      " %16, %17, %18, %19, %20, %21, %22, %23,"
      " %24, %25, %26, %27, %28, %29, %30, %31,"
      " %32, %33, %34, %35, %36, %37, %38, %39,"
      " %40, %41, %42, %43, %44, %45, %46, %47,"
      " %48, %49, %50, %51, %52, %53, %54, %55,"
      " %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, more, 1, 1, 0, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
        "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
        "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
        "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "l"(left), "l"(right), "r"(int(more)));
#else
  __trap();  // rather than no product
#endif
}
// The same of 64 columns, with a left factor in registers: of warp w and lane l, left[i] has columns 2 (l % 4) and the
// next, from 8 on where i is 2 or 3, of row 16 w + l / 4, 8 further where i is odd.
__device__ __forceinline__ void warpgroup_mma_bf16(float (&d)[32], const u32 (&left)[4], u64 right, bool more) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile(
      "{ .reg .pred more; setp.ne.b32 more, %37, 0;"
      " wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"
      " {%0, %1, %2, %3, %4, %5, %6, %7,"
      " %8, %9, %10, %11, %12, %13, %14, %15,"
      " %16, %17, %18, %19, %20, %21, %22, %23,"
      " %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, more, 1, 1, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "r"(int(more)));
#else
  __trap();  // rather than no product
#endif
}

}  // namespace weft
