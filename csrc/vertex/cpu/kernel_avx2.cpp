// The interpreter of vertex/cpu/kernel.h for x86-64 with AVX2 and FMA.
#ifdef __x86_64__
#include <immintrin.h>

#include <cstdint>

#include "vertex/code.h"
#include "vertex/cpu/kernel.h"

// After the other headers, see there.
#include "common/cpu/avx2-begin-inl.h"
#include "vertex/cpu/kernel-inl.h"

namespace weft::cpu {
const VertexTables& vertex_avx2() {
  return avx2::kVertexTables;
}
}  // namespace weft::cpu
#include "common/cpu/simd-end-inl.h"
#endif
