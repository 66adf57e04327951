// One kernel of a vertex function on one task of a frontier.
//   WEFT_VERTEX_TYPE     float or double, of registers; buffers may be narrower
//   WEFT_VERTEX_BUFFERS  how many it reads or writes
//   WEFT_VERTEX_WIDTH    columns
//   WEFT_VERTEX_LANES    threads of a row: 32 where it is reduced, else as many as columns or a part of that
//   WEFT_VERTEX_BODY     csrc/vertex/program/source.h
//
// Decomposition: a thread has one column of one row (or edge), of wide rows four that lie WEFT_VERTEX_LANES apart,
// neighbouring threads neighbouring columns, so that every load and store of a row is coalesced, those through the
// schedule's arrays included. All values of a kernel are registers of its thread. Cost per launch: what it loads and
// stores; a frontier of a small batch is one launch's latency. Vertices without children have kernels of their own,
// without what is zero there. A kernel that reduces rows has a warp for each, whose lanes add up every 32nd column and
// then each other's sums by shuffles, in a fixed order.
#include "vertex/exec/cuda/body.jit.cuh"

namespace {
constexpr int columns = WEFT_VERTEX_WIDTH, lanes = WEFT_VERTEX_LANES;
}

extern "C" __global__ void vertex_frontier(const FrontierArguments p,
                                           const Many<BufferArgument, WEFT_VERTEX_BUFFERS> buffers, int first,
                                           int count) {
  const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  const int lane = int(thread % lanes), j = lane;
  const long long local = thread / lanes;
  if (local >= count) return;
  const long long index = first + local;
  const int *vertices = p.vertices, *gather = p.gather, *first_edge = p.first_edge, *edge_children = p.edge_children,
            *edge_parents = p.edge_parents, *first_use = p.first_use, *users = p.users,
            *first_sum_use = p.first_sum_use, *sum_use_edges = p.sum_use_edges;
  const long long num_vertices = p.num_vertices;
  WEFT_VERTEX_BODY
}
