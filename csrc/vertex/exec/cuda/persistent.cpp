#include "vertex/exec/cuda/persistent.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "common/device.h"
#include "jit/too_many_blocks.h"
#include "vertex/exec/persistent_source.h"
#include "vertex/program/partition.h"

namespace weft::vertex {
namespace {

constexpr const char* kSource = "vertex/exec/cuda/persistent.jit.cu";

std::atomic<int64_t> refused{0};

PersistentSource source_of(const Program& program, const Partition& part, bool tf32, int32_t matrices, int32_t vectors,
                           const LossForm& form) {
  const DeviceLimits& device = device_limits();
  return persistent_source(program, part, tf32, device.max_shared_per_block, matrices, vectors, form,
                           device.compute_capability == 90);
}

}  // namespace

jit::Request persistent_request(const Program& program, Pass pass, int32_t most_blocks, bool tf32, int32_t matrices,
                                int32_t vectors, const LossForm& form) {
  const Partition& part = partition_of(program, pass, most_blocks);
  PersistentSource source = source_of(program, part, tf32, matrices, vectors, form);
  return {kSource, std::move(source.defines), device_limits().compute_capability};
}

const PersistentKernel& persistent_kernel(const Program& program, Pass pass, int32_t most_blocks, bool tf32,
                                          int32_t matrices, int32_t vectors, const LossForm& form) {
  const Partition& part = partition_of(program, pass, most_blocks);
  int device = 0;
  cuda_check(cudaGetDevice(&device), "cudaGetDevice");
  const std::lock_guard lock(program.partitions->mutex);
  std::shared_ptr<void>& known =
      program.partitions->kernels[{device, static_cast<int64_t>(pass) + kPasses * tf32, most_blocks,
                                   form.classes * 4 + form.head * 2 + form.cross_entropy}];
  if (known == nullptr) {
    const PersistentSource source = source_of(program, part, tf32, matrices, vectors, form);
    jit::Kernel& made = jit::kernel(kSource, source.defines, "vertex_persistent");
    const auto shared = static_cast<unsigned>(source.shared_bytes);
    const int at_once = made.max_active_blocks_per_sm(dim3(kPersistentThreads), shared) * made.sm_count();
    const int groups = device_limits().cooperative_launch ? at_once / part.blocks : 0;
    known = std::shared_ptr<PersistentKernel>(new PersistentKernel{&made, part.blocks, shared, groups});
  }
  return *static_cast<PersistentKernel*>(known.get());
}

int64_t refused_launches() {
  return refused;
}

FrontierArguments arguments_of(const Arrays& a) {
  FrontierArguments found{};
  found.vertices = a.vertices;
  found.gather = a.gather;
  found.first_edge = a.first_edge;
  found.edge_children = a.edge_children;
  found.edge_parents = a.edge_parents;
  found.first_use = a.first_use;
  found.users = a.users;
  found.first_sum_use = a.first_sum_use;
  found.sum_use_edges = a.sum_use_edges;
  found.num_vertices = a.num_vertices;
  return found;
}

bool launch_persistent(const PersistentKernel& kernel, const Memory& memory, Pass pass, unsigned* arrived,
                       cudaStream_t stream, const TrainingArguments* training, const UpdateArgument* updates) {
  PersistentArguments a{arguments_of(memory.arrays), memory.scripts[static_cast<size_t>(pass)], arrived,
                        memory.apart[static_cast<size_t>(pass)]};
  std::vector<BufferArgument> buffers;
  for (const Place& place : memory.buffers) buffers.push_back({place.data, place.stride});
  std::vector<MatrixArgument> matrices;
  for (const Matrix& m : memory.matrices) matrices.push_back({m.data, m.row_stride, m.column_stride});
  if (buffers.empty()) buffers.emplace_back();
  if (matrices.empty()) matrices.emplace_back();
  void* arguments[] = {&a, buffers.data(), matrices.data(), const_cast<TrainingArguments*>(training),
                       const_cast<UpdateArgument*>(updates)};
  try {
    kernel.kernel->launch(dim3(static_cast<unsigned>(kernel.blocks * memory.groups)), dim3(kPersistentThreads),
                          kernel.shared_bytes, 0,
                          /*cooperative=*/true, stream, arguments);
  } catch (const jit::TooManyBlocks&) {  // as where processes share a device
    kernel.most_groups = memory.groups - 1;
    ++refused;
    return false;
  }
  return true;
}

}  // namespace weft::vertex
