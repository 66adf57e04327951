#include "common/cpu/kernels.h"

#include <ATen/Version.h>

#include <string>

namespace weft::cpu {

InstructionSet instruction_set() {
#ifdef __x86_64__
  static const std::string capability = at::get_cpu_capability();
  static const InstructionSet set = capability == "AVX512" ? InstructionSet::kAvx512
                                    : capability == "AVX2" ? InstructionSet::kAvx2
                                                           : InstructionSet::kBaseline;
  return set;
#else
  return InstructionSet::kBaseline;
#endif
}

}  // namespace weft::cpu
