// What vertex/exec/cuda/frontier.jit.cu and tail.jit.cu are launched with. For hosts and kernels.
#pragma once

namespace weft::vertex {

struct FrontierArguments {
  // Arrays of csrc/vertex/graph/schedule.h.
  const int *vertices, *gather, *first_edge, *edge_children, *edge_parents, *first_use, *users, *first_sum_use,
      *sum_use_edges;
  long long num_vertices;
};

struct BufferArgument {
  void* data;
  long long stride;
};

struct MatrixArgument {
  const void* data;
  long long row, column;  // strides in elements, one of them 1
};

// A parameter for each buffer or matrix of a kernel; the host passes an array.
template <typename E, int N>
struct Many {
  E of[N];
};

// What parameters may take (CUDA C++ Programming Guide, "__global__ function parameters"), and the most buffers of one
// kernel of a frontier.
constexpr int kMaxParameterBytes = 32764;
constexpr int kMaxFrontierBuffers = 2000;

constexpr int kTailThreads = 512;
constexpr int kTailShared = kTailThreads / 32 * 16 * 32 * 4;  // bytes: a tile of floats for each warp

struct TailArguments {
  FrontierArguments frontier;
  const int* tasks;         // csrc/vertex/graph/schedule.h
  int first, count, apart;  // tasks first, first + apart, ...: count of them
  unsigned* arrived;        // 0
};

}  // namespace weft::vertex
