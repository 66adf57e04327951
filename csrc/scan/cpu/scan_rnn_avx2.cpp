// weft::scan_rnn's CPU kernels for x86-64 with AVX2 and FMA.
#ifdef __x86_64__
#include <immintrin.h>

#include <cstdint>

#include "scan/cpu/scan_rnn_kernels.h"

// After the other headers, see there.
#include "common/cpu/avx2-begin-inl.h"
#include "scan/cpu/scan_rnn_kernels-inl.h"

namespace weft::cpu {
const ScanRnnTables& scan_rnn_avx2() {
  return avx2::kTables;
}
}  // namespace weft::cpu
#include "common/cpu/simd-end-inl.h"
#endif
