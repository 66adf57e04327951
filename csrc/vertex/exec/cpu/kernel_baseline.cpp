// The interpreter of vertex/exec/cpu/kernel.h for what every processor of the architecture has.
#define WEFT_ISA baseline
#define WEFT_VECTOR_BYTES 16
#define WEFT_REGISTERS 16
#include "vertex/exec/cpu/kernel-inl.h"

namespace weft::cpu {
const VertexTables& vertex_baseline() {
  return baseline::kVertexTables;
}
}  // namespace weft::cpu
