// The interpreter of vertex/exec/cpu/kernel.h for x86-64 with AVX2 and FMA.
#ifdef __x86_64__
#include "vertex/exec/cpu/kernel.h"
#include "vertex/program/program.h"

// After the other headers, and in this order.
#include "common/cpu/avx2-begin-inl.h"

#include "vertex/exec/cpu/kernel-inl.h"

#include "common/cpu/simd-end-inl.h"
#endif
