// weft::rnn's CPU kernels for x86-64 with AVX2 and FMA.
#ifdef __x86_64__
#include <immintrin.h>

#include <cstdint>

#include "rnn/cpu/rnn_kernels.h"

// After every other header: what they define is shared with code that runs on any processor.
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#define WEFT_ISA avx2
#define WEFT_VECTOR_BYTES 32
#define WEFT_REGISTERS 16
#include "rnn/cpu/rnn_kernels-inl.h"

namespace weft::cpu {
const RnnTables& rnn_avx2() {
  return avx2::kRnnTables;
}
}  // namespace weft::cpu
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
