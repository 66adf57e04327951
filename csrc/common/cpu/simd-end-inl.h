// The end of what baseline-, avx2- or avx512-begin-inl.h began; GCC's pragma lasts until the end of the file.
#if defined(__clang__) && WEFT_VECTOR_BYTES > 16
#pragma clang attribute pop
#endif
