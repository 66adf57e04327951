// weft::scan_rnn's CPU kernels for x86-64 with AVX-512 (F, VL, BW, DQ).
#ifdef __x86_64__
#include <immintrin.h>

#include <cstdint>

#include "scan/cpu/scan_rnn_kernels.h"

// After the other headers, see there.
#include "common/cpu/avx512-begin-inl.h"
#include "scan/cpu/scan_rnn_kernels-inl.h"

namespace weft::cpu {
const ScanRnnTables& scan_rnn_avx512() {
  return avx512::kTables;
}
}  // namespace weft::cpu
#include "common/cpu/simd-end-inl.h"
#endif
