// From here to simd-end-inl.h: code for x86-64 with AVX-512 (F, VL, BW, DQ). Comes after every other header, because
// what they define is shared with code that runs on any processor.
#include <immintrin.h>

#include <cstdint>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,f16c")
#endif
#define WEFT_ISA avx512
#define WEFT_VECTOR_BYTES 64
#define WEFT_REGISTERS 32
