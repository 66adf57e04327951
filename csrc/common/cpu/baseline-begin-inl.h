// From here to simd-end-inl.h: code for what every processor of the architecture has (SSE2 on x86-64, NEON on arm64).
#define WEFT_ISA baseline
#define WEFT_VECTOR_BYTES 16
#define WEFT_REGISTERS 16
