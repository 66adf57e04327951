// The enumeration and the table of instructions, from ops.def.
#pragma once
#include <cstdint>

namespace weft::vertex {

enum class Op : int32_t {
#define WEFT_MEMORY(name, Name, ...) k##Name,
#define WEFT_UNARY(name, Name, ...) k##Name,
#define WEFT_SCALAR(name, Name, ...) k##Name,
#define WEFT_BINARY(name, Name, ...) k##Name,
#define WEFT_TERNARY(name, Name, ...) k##Name,
#include "vertex/program/ops.def"
};

struct OpInfo {
  const char* name;
  int operands;      // registers that it reads
  bool elementwise;  // else it has code of its own where it runs
  bool stores;       // and has no result
  const char *cuda, *derivatives;
};

inline constexpr OpInfo kOps[] = {
#define WEFT_MEMORY(name, Name, operands, stores) {#name, operands, false, stores, "", ""},
#define WEFT_UNARY(name, Name, cpu, cuda, derivatives) {#name, 1, true, false, cuda, derivatives},
#define WEFT_SCALAR(name, Name, cpu, cuda, derivatives) {#name, 1, true, false, cuda, derivatives},
#define WEFT_BINARY(name, Name, cpu, cuda, derivatives) {#name, 2, true, false, cuda, derivatives},
#define WEFT_TERNARY(name, Name, cpu, cuda, derivatives) {#name, 3, true, false, cuda, derivatives},
#include "vertex/program/ops.def"
};

constexpr const OpInfo& info(Op op) {
  return kOps[static_cast<int32_t>(op)];
}

}  // namespace weft::vertex
