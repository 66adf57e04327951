// Vectorised CPU kernels: one source, one object per instruction set, and torch's own choice among them, which
// ATEN_CPU_CAPABILITY lowers. A room that wants some has
//
//   <op>_kernels.h       struct Table, function pointers that take pointers and sizes, no torch header, and below it
//                        WEFT_CPU_KERNELS(Table, name)
//   <op>_kernels-inl.h   includes common/cpu/simd-inl.h; the kernels, then const Table name = {...}, in the namespace
//                        weft::cpu::WEFT_ISA
//   <op>_baseline.cpp, <op>_avx2.cpp, <op>_avx512.cpp
//                        three includes each, see scan/cpu
//
// and calls weft::cpu::name().function(...).
#pragma once

namespace weft::cpu {

enum class InstructionSet { kBaseline, kAvx2, kAvx512 };
InstructionSet instruction_set();

template <typename Table>
const Table& chosen(const Table* const (&tables)[3]) {
  return *tables[int(instruction_set())];
}

}  // namespace weft::cpu

#ifdef __x86_64__
#define WEFT_CPU_TABLES(name) \
  { &baseline::name, &avx2::name, &avx512::name }
#else
#define WEFT_CPU_TABLES(name) \
  { &baseline::name, nullptr, nullptr }
#endif

#define WEFT_CPU_KERNELS(Table, name)            \
  namespace weft::cpu::baseline {                \
  extern const Table name;                       \
  }                                              \
  namespace weft::cpu::avx2 {                    \
  extern const Table name;                       \
  }                                              \
  namespace weft::cpu::avx512 {                  \
  extern const Table name;                       \
  }                                              \
  namespace weft::cpu {                          \
  inline const Table& name() {                   \
    return chosen<Table>(WEFT_CPU_TABLES(name)); \
  }                                              \
  }
