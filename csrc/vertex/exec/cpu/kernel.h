// Kernels of a vertex function on the CPU: an interpreter whose instructions are loops over a cache-sized block of
// columns, one table per instruction set. No torch header.
//
// Decomposition: rows (or edges) are independent of each other; a row is cut into blocks of kBlock columns, and each
// instruction runs over a block, so that its dispatch is paid once for kBlock elements and all registers of a kernel
// stay in L1. A load is no copy where the buffer has the registers' type: the register points into it.
#pragma once
#include <cstdint>
#include <vector>

#include "vertex/program/program.h"

#include "common/cpu/kernels.h"

namespace weft::cpu {

constexpr int64_t kVertexBlock = 256;

// A buffer of the program, in memory.
struct VertexBuffer {
  void* data;
  int64_t stride;       // in elements
  const int32_t* rows;  // the caller's row of each row, for his tensors
  bool edges;
  DType dtype;
};

struct VertexKernel {
  const vertex::Instruction* code;
  int64_t length;
  int64_t width, registers;
  bool edges;
  const VertexBuffer* buffers;
  const double* constants;
  const std::vector<vertex::Use>* tables;
  // Arrays of csrc/vertex/graph/schedule.h; first_sum_use is null where it is empty.
  const int32_t *gather, *first_edge, *edge_children, *edge_parents, *first_use, *users, *first_sum_use, *sum_use_edges;
  int64_t num_vertices;
};

// A block and its padding for each register, for zeros and for a row that is converted, and where each register is.
constexpr int64_t vertex_scratch(int64_t registers, int64_t element_bytes) {
  return (registers + 2) * (kVertexBlock + 16) * element_bytes + registers * int64_t(sizeof(void*));
}

struct VertexTables {
  // Rows or edges [first, end). `scratch` has vertex_scratch bytes, at a multiple of 64.
  void (*run_float)(const VertexKernel& kernel, int64_t first, int64_t end, void* scratch);
  void (*run_double)(const VertexKernel& kernel, int64_t first, int64_t end, void* scratch);
};

}  // namespace weft::cpu

WEFT_CPU_KERNELS(VertexTables, vertex_kernels)
