// The enumeration and the table of element-wise instructions, from elementwise.def.
#pragma once
#include <cstdint>

namespace weft {

enum class Elementwise : int32_t {
#define WEFT_UNARY(name, Name, ...) k##Name,
#define WEFT_SCALAR(name, Name, ...) k##Name,
#define WEFT_BINARY(name, Name, ...) k##Name,
#define WEFT_TERNARY(name, Name, ...) k##Name,
#include "common/elementwise.def"
};

struct ElementwiseInfo {
  const char* name;
  int operands;  // registers that it reads
  const char *cuda, *derivatives;
};

inline constexpr ElementwiseInfo kElementwise[] = {
#define WEFT_UNARY(name, Name, cpu, cuda, derivatives) {#name, 1, cuda, derivatives},
#define WEFT_SCALAR(name, Name, cpu, cuda, derivatives) {#name, 1, cuda, derivatives},
#define WEFT_BINARY(name, Name, cpu, cuda, derivatives) {#name, 2, cuda, derivatives},
#define WEFT_TERNARY(name, Name, cpu, cuda, derivatives) {#name, 3, cuda, derivatives},
#include "common/elementwise.def"
};

constexpr const ElementwiseInfo& info(Elementwise op) {
  return kElementwise[static_cast<int32_t>(op)];
}

}  // namespace weft
