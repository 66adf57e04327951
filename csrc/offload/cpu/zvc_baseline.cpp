// zvc_compress's CPU kernels for what every processor of the architecture has.
#define WEFT_ISA baseline
#define WEFT_VECTOR_BYTES 16
#include "offload/cpu/zvc_kernels-inl.h"

namespace weft::cpu {
const ZvcTables& zvc_baseline() {
  return baseline::kZvcTables;
}
}  // namespace weft::cpu
