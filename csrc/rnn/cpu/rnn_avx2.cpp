// weft::rnn's CPU kernels for x86-64 with AVX2 and FMA.
#ifdef __x86_64__
#include <immintrin.h>

#include <cstdint>

#include "rnn/cpu/rnn_kernels.h"

// After the other headers, see there.
#include "common/cpu/avx2-begin-inl.h"
#include "rnn/cpu/rnn_kernels-inl.h"

namespace weft::rnn {
const RnnTables& rnn_avx2() {
  return avx2::kRnnTables;
}
}  // namespace weft::rnn
#include "common/cpu/simd-end-inl.h"
#endif
