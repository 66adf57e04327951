// How a cell's arithmetic is compiled: into its caller, on the caller's processor. It has no function of its own, so
// that what is included once per instruction set never meets.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define WEFT_CELL_STEP __device__ __forceinline__
#else
#define WEFT_CELL_STEP inline __attribute__((always_inline))
#endif
