// zvc_compress's CPU kernels for x86-64 with AVX2.
#ifdef __x86_64__
#include <immintrin.h>

#include <cstdint>

#include "offload/cpu/zvc_kernels.h"

// After the other headers, see there.
#include "common/cpu/avx2-begin-inl.h"
#include "offload/cpu/zvc_kernels-inl.h"

namespace weft::cpu {
const ZvcTables& zvc_avx2() {
  return avx2::kZvcTables;
}
}  // namespace weft::cpu
#include "common/cpu/simd-end-inl.h"
#endif
