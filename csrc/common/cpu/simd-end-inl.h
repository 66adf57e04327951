// The end of what avx2-begin-inl.h or avx512-begin-inl.h began; GCC's pragma lasts until the end of the file.
#ifdef __clang__
#pragma clang attribute pop
#endif
