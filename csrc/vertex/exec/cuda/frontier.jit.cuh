// What vertex/exec/cuda/frontier.jit.cu and tail.jit.cu are launched with. For hosts and kernels.
#pragma once

namespace weft::vertex {

constexpr int kMaxFrontierBuffers = 64;

struct FrontierArguments {
  void* data[kMaxFrontierBuffers];  // of the kernel's buffers
  long long stride[kMaxFrontierBuffers];
  // Arrays of csrc/vertex/graph/schedule.h.
  const int *vertices, *gather, *first_edge, *edge_children, *edge_parents, *first_use, *users, *first_sum_use,
      *sum_use_edges;
  long long num_vertices;
};

constexpr int kMaxTailMatrices = 16, kTailThreads = 512;
constexpr int kTailShared = kTailThreads / 32 * 16 * 32 * 4;  // bytes: a tile of floats for each warp

struct TailArguments {
  FrontierArguments frontier;  // all buffers of the program
  struct Matrix {
    const void* data;
    long long row, column;  // strides in elements, one of them 1
  } matrices[kMaxTailMatrices];
  const int* tasks;         // csrc/vertex/graph/schedule.h
  int first, count, apart;  // tasks first, first + apart, ...: count of them
  unsigned* arrived;        // 0
};

}  // namespace weft::vertex
