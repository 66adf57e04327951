// zvc_compress's CPU kernels for x86-64 with AVX-512 (F, VL, BW, DQ).
#ifdef __x86_64__
#include <immintrin.h>

#include <cstdint>

#include "offload/cpu/zvc_kernels.h"

// After the other headers, see there.
#include "common/cpu/avx512-begin-inl.h"
#include "offload/cpu/zvc_kernels-inl.h"

namespace weft::cpu {
const ZvcTables& zvc_avx512() {
  return avx512::kZvcTables;
}
}  // namespace weft::cpu
#include "common/cpu/simd-end-inl.h"
#endif
