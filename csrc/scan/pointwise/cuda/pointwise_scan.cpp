// pointwise_scan on CUDA: one kernel each way, compiled for the step. The host runs ahead of the device: nothing here
// waits for it, so calls can be captured in a CUDA graph.
//
// Floor of a GRU's gates in float32, forward 4 streams of T N numbers, both passes 12, at the bus's speed.
#include "scan/pointwise/pointwise_scan.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <initializer_list>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "common/device.h"
#include "common/integers.h"
#include "common/tensor.h"
#include "jit/jit.h"
#include "jit/too_many_blocks.h"
#include "scan/newton/report.h"
#include "scan/pointwise/source.h"

namespace weft::scan {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
// Warps that a multiprocessor is given where time is cut: enough to wait for memory and arithmetic at once. The
// backward pass has more of both in a warp.
constexpr int kForwardWarps = 16, kBackwardWarps = 12;

// Steps that are loaded at once: what a lane has room for.
int64_t batch_of(int64_t streams) {
  return streams <= 4 ? 8 : streams <= 8 ? 4 : streams <= 16 ? 2 : 1;
}

const char* element_of(at::ScalarType type) {
  return type == at::kHalf ? "Float16" : type == at::kBFloat16 ? "BFloat16" : type == at::kFloat ? "float" : "double";
}

struct Compiled {
  jit::Kernel* kernel;
  int blocks_per_sm;
};

// The kernel of a step on the current device; found again without writing its source.
Compiled compiled(const Pointwise& p, bool backward, bool chunked, int64_t batch, uint64_t wanted, uint32_t given) {
  using Key = std::tuple<const StepProgram*, int, at::ScalarType, bool, bool, uint64_t, uint32_t>;
  static std::mutex& mutex = *new std::mutex;
  static auto& known = *new std::map<Key, Compiled>;
  const StepProgram& step = *p.step;
  const Key key{&step, at::cuda::current_device(), p.dtype, backward, chunked, wanted, given};
  {
    const std::lock_guard lock(mutex);
    const auto found = known.find(key);
    if (found != known.end()) return found->second;
  }
  jit::Defines defines = {std::string("WEFT_ELEMENT=") + element_of(p.dtype),
                          std::string("WEFT_TYPE=") + (p.acc == at::kDouble ? "double" : "float"),
                          "WEFT_STATES=" + std::to_string(step.states),
                          "WEFT_INPUTS=" + std::to_string(step.inputs),
                          "WEFT_PARAMETERS=" + std::to_string(step.parameters),
                          "WEFT_BATCH=" + std::to_string(batch),
                          std::string("WEFT_CHUNKED=") + (chunked ? "1" : "0")};
  if (backward) {
    defines.push_back("WEFT_GRADS=" + std::to_string(given));
    defines.push_back("WEFT_WANTED=" + std::to_string(wanted) + "ull");
    defines.push_back("WEFT_VJP=" + step_body(step, {{"g", step.vjp}}));
    defines.push_back("WEFT_VJP_JACOBIAN=" + step_body(step, {{"g", step.vjp}, {"jacobian", step.jacobian}}));
  } else {
    defines.push_back("WEFT_NEXT=" + step_body(step, {{"next", step.next}}));
    defines.push_back("WEFT_NEXT_JACOBIAN=" + step_body(step, {{"next", step.next}, {"jacobian", step.jacobian}}));
  }
  jit::Kernel& kernel =
      jit::kernel(backward ? "scan/pointwise/cuda/backward.jit.cu" : "scan/pointwise/cuda/forward.jit.cu", defines,
                  backward ? "pointwise_backward" : "pointwise_forward");
  const Compiled made{&kernel, kernel.max_active_blocks_per_sm(dim3(kThreads), 0)};
  const std::lock_guard lock(mutex);
  return known.emplace(key, made).first->second;
}

// Room for these many numbers one after the other, as launches and allocations are what a short call's time is.
at::Tensor room(const Pointwise& p, std::initializer_list<std::pair<void**, int64_t>> wanted) {
  int64_t all = 0;
  for (const auto& [to, count] : wanted) all += count;
  const at::Tensor memory = at::empty({all}, p.init[0].options().dtype(p.acc));
  char* next = static_cast<char*>(memory.data_ptr());
  for (const auto& [to, count] : wanted) {
    *to = next;
    next += count * memory.element_size();
  }
  return memory;
}

// What is counted and met by: zeros.
at::Tensor counters(const Pointwise& p, int64_t count, at::ScalarType type = at::kInt) {
  const at::Tensor zeros = at::empty({count}, p.init[0].options().dtype(type));
  C10_CUDA_CHECK(cudaMemsetAsync(zeros.data_ptr(), 0, zeros.nbytes(), at::cuda::getCurrentCUDAStream()));
  return zeros;
}

void launch(const Compiled& c, const Pointwise& p, PointwiseArgs& a, bool cooperative) {
  const int64_t tasks = ceil_div(p.N, int64_t{32}) * a.chunks;
  int64_t blocks = ceil_div(tasks, int64_t{kWarps});
  if (cooperative) blocks = std::min<int64_t>(blocks, int64_t{c.blocks_per_sm} * c.kernel->sm_count());
  void* arguments[] = {&a};
  c.kernel->launch(Grid(blocks), dim3(kThreads), 0, 0, cooperative, at::cuda::getCurrentCUDAStream(), arguments);
}

// Channels that fill the device, by warps of a multiprocessor; none where its blocks cannot meet.
int64_t busy(int warps) {
  const DeviceLimits& limits = device_limits();
  return limits.cooperative_launch ? int64_t{32} * warps * limits.sm_count : 0;
}

std::vector<at::Tensor> pointwise_forward_cuda(at::TensorList init, at::TensorList inputs, at::TensorList parameters,
                                               c10::string_view program, bool stacked, bool reverse,
                                               c10::string_view algorithm, c10::string_view name) {
  const Pointwise p = check_pointwise("pointwise_scan", init, inputs, parameters, program, stacked, reverse, algorithm);
  const c10::cuda::CUDAGuard guard(init[0].device());
  const StepProgram& step = *p.step;
  std::vector<at::Tensor> states, kept;
  for (int32_t i = 0; i < step.states; ++i) states.push_back(at::empty(p.states_shape(), init[0].options()));
  if (p.empty()) return states;
  const int64_t batch = batch_of(step.inputs), S = step.states;
  PointwisePlan plan = plan_on_cuda(p.T, p.N, step.inputs, p.chunks_allowed, p.chunks_wanted);
  while (true) {
    PointwiseArgs a = describe_pointwise(p, plan, kept);
    for (int32_t i = 0; i < S; ++i) a.states[i] = states[i].mutable_data_ptr();
    const bool chunked = plan.chunks > 1;
    const Compiled c = compiled(p, /*backward=*/false, chunked, batch, 0, 0);
    if (!chunked) {
      launch(c, p, a, /*cooperative=*/false);
      return states;
    }
    const int64_t states_of_chunks = 2 * plan.chunks * S * p.N;
    const bool half = init[0].element_size() == 2;
    const at::Tensor memory = room(p, {{&a.starts, states_of_chunks},
                                       {&a.ends, states_of_chunks},
                                       {&a.derivatives, states_of_chunks * S},
                                       {&a.marks, half ? ceil_div(p.T, batch) * S * p.N : 0}}),
                     flags = counters(p, kPointwiseCounters);
    at::Tensor statistics;
    a.counters = reinterpret_cast<unsigned*>(flags.mutable_data_ptr<int>());
    NewtonReport* report = newton_report();
    if (report != nullptr) {
      statistics = counters(p, 4 * p.N, at::kLong).view({p.N, 4});
      a.statistics = static_cast<long long*>(statistics.mutable_data_ptr());
    }
    try {
      if (c.blocks_per_sm == 0) throw jit::TooManyBlocks("");
      launch(c, p, a, /*cooperative=*/true);
    } catch (const jit::TooManyBlocks&) {  // as where processes share a device
      plan = {1, p.T};
      continue;
    }
    if (report != nullptr) report->runs.push_back({std::string(name), p.T, plan.chunks, statistics});
    return states;
  }
}

std::vector<at::Tensor> pointwise_backward_cuda(const OptionalTensors& grads, at::TensorList init,
                                                at::TensorList inputs, at::TensorList parameters, at::TensorList states,
                                                c10::string_view program, bool stacked, bool reverse,
                                                c10::string_view algorithm, c10::List<bool> output_mask) {
  const Pointwise p =
      check_pointwise("pointwise_scan_backward", init, inputs, parameters, program, stacked, reverse, algorithm);
  const c10::cuda::CUDAGuard guard(init[0].device());
  const StepProgram& step = *p.step;
  const int64_t S = step.states, batch = batch_of(step.inputs + 2 * S), fill = busy(kBackwardWarps);
  PointwisePlan plan = plan_pointwise(p.T, p.N, batch, fill, p.chunks_allowed && fill > 0, p.chunks_wanted);
  std::vector<at::Tensor> kept;
  while (true) {
    PointwiseArgs a = describe_pointwise(p, plan, kept);
    PointwiseGradients gradients(p, grads, states, output_mask, plan, a, kept);
    if (p.empty()) return gradients.results();
    const bool chunked = plan.chunks > 1;
    const Compiled c = compiled(p, /*backward=*/true, chunked, batch, gradients.wanted(), gradients.given());
    if (!chunked) {
      launch(c, p, a, /*cooperative=*/false);
      return gradients.results();
    }
    const int64_t states_of_chunks = plan.chunks * S * p.N;
    const at::Tensor memory = room(p, {{&a.ends, states_of_chunks}, {&a.derivatives, states_of_chunks * S}}),
                     flags = counters(p, kPointwiseCounters + p.N);
    a.counters = reinterpret_cast<unsigned*>(flags.mutable_data_ptr<int>());
    a.fallen = flags.mutable_data_ptr<int>() + kPointwiseCounters;
    try {
      if (c.blocks_per_sm == 0) throw jit::TooManyBlocks("");
      launch(c, p, a, /*cooperative=*/true);
    } catch (const jit::TooManyBlocks&) {
      plan = {1, p.T};
      continue;
    }
    return gradients.results();
  }
}

}  // namespace

PointwisePlan plan_on_cuda(int64_t T, int64_t N, int64_t inputs, bool allowed, bool wanted) {
  const int64_t fill = busy(kForwardWarps);
  return plan_pointwise(T, N, batch_of(inputs), fill, allowed && fill > 0, wanted);
}

TORCH_LIBRARY_IMPL(weft, CUDA, m) {
  m.impl("pointwise_scan", pointwise_forward_cuda);
  m.impl("pointwise_scan_backward", pointwise_backward_cuda);
}

}  // namespace weft::scan
