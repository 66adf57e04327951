// The interpreter of vertex/exec/cpu/kernel.h for x86-64 with AVX-512.
#ifdef __x86_64__
#include <immintrin.h>

#include <cstdint>

#include "vertex/exec/cpu/kernel.h"
#include "vertex/program/program.h"

// After the other headers, see there.
#include "common/cpu/avx512-begin-inl.h"
#include "vertex/exec/cpu/kernel-inl.h"

namespace weft::cpu {
const VertexTables& vertex_avx512() {
  return avx512::kVertexTables;
}
}  // namespace weft::cpu
#include "common/cpu/simd-end-inl.h"
#endif
