// What vertex/cuda/frontier.jit.cu is launched with. For hosts and kernels.
#pragma once

namespace weft::vertex {

constexpr int kMaxFrontierBuffers = 64;

struct FrontierArguments {
  void* data[kMaxFrontierBuffers];  // of the kernel's buffers
  long long stride[kMaxFrontierBuffers];
  // Arrays of csrc/vertex/schedule.h.
  const int *vertices, *gather, *first_edge, *edge_children, *edge_parents, *first_use, *use_rows, *use_columns,
      *first_sum_use, *sum_use_edges;
  long long num_vertices;
};

}  // namespace weft::vertex
