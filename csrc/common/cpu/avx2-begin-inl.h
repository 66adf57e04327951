// From here to simd-end-inl.h: code for x86-64 with AVX2 and FMA. Comes after every other header, because what they
// define is shared with code that runs on any processor.
#include <immintrin.h>

#include <cstdint>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#define WEFT_ISA avx2
#define WEFT_VECTOR_BYTES 32
#define WEFT_REGISTERS 16
