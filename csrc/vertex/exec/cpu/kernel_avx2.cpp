// The interpreter of vertex/exec/cpu/kernel.h for x86-64 with AVX2 and FMA.
#ifdef __x86_64__
#include <immintrin.h>

#include <cstdint>

#include "vertex/exec/cpu/kernel.h"
#include "vertex/program/program.h"

// After the other headers, see there.
#include "common/cpu/avx2-begin-inl.h"
#include "vertex/exec/cpu/kernel-inl.h"

namespace weft::cpu {
const VertexTables& vertex_avx2() {
  return avx2::kVertexTables;
}
}  // namespace weft::cpu
#include "common/cpu/simd-end-inl.h"
#endif
