// Zero-value compression on the CPU, by elements of 2 or 4 bytes as bits: -0.0 and NaN are not zero.
//
// Decomposition: a chunk of whole mask words per task. Compressing reads x twice, to count and to write, because a
// chunk's place in `values` is the sum of the counts before it; a single chunk is written in one pass. Decompressing
// first counts the bits of the mask, which are at most a sixteenth of what it then writes.
// Cost: with AVX2 eight elements per table look-up and permutation, with AVX-512 a compress instruction for sixteen.
#pragma once
#include <cstdint>

#include "common/cpu/kernels.h"

namespace weft::cpu {

template <typename T>
struct ZvcKernels {
  // Elements of x that are not zero.
  int64_t (*count)(const T* x, int64_t n);
  // The mask of x, and its non-zeros to `values`, which has room for exactly as many. n: a multiple of 32, or the end.
  void (*pack)(const T* x, int64_t n, uint32_t* mask, T* values, int64_t room);
  // n elements to `out`; reads no more than the first `available` of `values`, which are enough.
  void (*expand)(const uint32_t* mask, int64_t n, const T* values, int64_t available, T* out);
};

struct ZvcTables {
  ZvcKernels<uint16_t> b16;
  ZvcKernels<uint32_t> b32;
};

}  // namespace weft::cpu

WEFT_CPU_KERNELS(ZvcTables, zvc_kernels)
