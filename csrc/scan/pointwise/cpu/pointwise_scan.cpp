// pointwise_scan on the CPU: threads over blocks of columns; pointwise_kernels.h has the rest. As on the GPU, the
// problem alone decides how time is cut.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "common/integers.h"
#include "common/tensor.h"
#include "scan/newton/report.h"
#include "scan/pointwise/cpu/pointwise_kernels.h"
#include "scan/pointwise/pointwise_scan.h"

namespace weft::scan {
namespace {

using cpu::kPointwiseBatch;
using cpu::kPointwiseBlock;
using cpu::PointwiseBlock;
using cpu::PointwiseJob;
using cpu::PointwiseWalk;

// Columns that are worth an instruction's dispatch; more only cost their derivatives.
constexpr int64_t kBusy = 64;

int type_of(at::ScalarType type) {
  return type == at::kHalf ? 0 : type == at::kBFloat16 ? 1 : type == at::kFloat ? 2 : 3;
}

template <typename F>
void by_acc(at::ScalarType acc, F f) {
  if (acc == at::kDouble) {
    f(double{});
  } else {
    f(float{});
  }
}

// The code of a step, cut into what is constant and what is not.
struct Code {
  std::vector<int32_t> constants, order;
  Code(const StepProgram& step, const std::vector<int32_t>& roots) {
    for (const int32_t k : step.needed(roots)) {
      (step.code[k].kind == StepProgram::Kind::kConstant ? constants : order).push_back(k);
    }
  }
};

PointwiseJob job_of(const PointwiseArgs& args, const StepProgram& step, const Code& code,
                    const std::vector<int32_t>& results) {
  PointwiseJob job{};
  job.args = &args;
  job.states = step.states;
  job.inputs = step.inputs;
  job.parameters = step.parameters;
  job.code = step.code.data();
  job.constants = code.constants.data();
  job.num_constants = static_cast<int64_t>(code.constants.size());
  job.order = code.order.data();
  job.length = static_cast<int64_t>(code.order.size());
  job.results = results.data();
  return job;
}

std::vector<int32_t> joined(std::vector<int32_t> a, const std::vector<int32_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

class Runner {
 public:
  Runner(const Pointwise& p, const PointwisePlan& plan) : p_(p), plan_(plan) {
    bytes_ =
        cpu::pointwise_scratch(p.step->registers(), p.step->states, p.step->parameters, p.acc == at::kDouble ? 8 : 4);
  }

  // All columns, or those of `active`; a block's chunks side by side where its channels are few.
  void blocks(PointwiseWalk walk, const PointwiseJob& job) const {
    const int64_t channels = std::min(p_.N, kPointwiseBlock), chunks = kPointwiseBlock / channels;
    const int64_t across = ceil_div(p_.N, channels), down = ceil_div(plan_.chunks, chunks);
    at::parallel_for(0, across * down, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t first = i % across * channels, from = i / across * chunks;
        run(walk, job, {first, std::min(channels, p_.N - first), from, std::min(chunks, plan_.chunks - from)});
      }
    });
  }

  // f(first, end) of ranges of channels.
  template <typename F>
  void channels(F f) const {
    at::parallel_for(0, p_.N, kPointwiseBlock, f);
  }

  void run(PointwiseWalk walk, const PointwiseJob& job, const PointwiseBlock& block) const {
    if (job.active != nullptr && !any_active(job, block)) return;
    thread_local std::vector<char> memory;
    if (static_cast<int64_t>(memory.size()) < bytes_ + 64) memory.resize(bytes_ + 64);
    const auto address = reinterpret_cast<uintptr_t>(memory.data());
    walk(job, block, reinterpret_cast<void*>((address + 63) / 64 * 64));
  }

 private:
  bool any_active(const PointwiseJob& job, const PointwiseBlock& b) const {
    for (int64_t c = b.chunk; c < b.chunk + b.chunks; ++c) {
      const char* row = job.active + c * p_.N + b.channel;
      if (std::any_of(row, row + b.channels, [](char x) { return x != 0; })) return true;
    }
    return false;
  }

  const Pointwise& p_;
  const PointwisePlan& plan_;
  int64_t bytes_;
};

// The numbers of chunks that a channel has, as the workspaces have them.
template <typename T>
struct Chunks {
  const PointwiseArgs& a;
  int64_t S;
  T& at(void* data, int64_t count, int64_t chunk, int64_t i, int64_t n) const {
    return static_cast<T*>(data)[(chunk * count + i) * a.N + n];
  }
  T& start(int64_t c, int64_t i, int64_t n) const { return at(a.starts, S, c, i, n); }
  T& end(int64_t c, int64_t i, int64_t n) const { return at(a.ends, S, c, i, n); }
  T derivative(int64_t c, int64_t i, int64_t n) const { return at(a.derivatives, S * S, c, i, n); }
};

// Whether a state is the same as another but for a rounding, and not infinity and another.
template <typename T>
bool meets(const T* h, const T* other, int64_t S, T& apart) {
  constexpr T near = sizeof(T) == 8 ? T(0x1p-51) : T(0x1p-22);
  T most = apart;
  for (int64_t i = 0; i < S; ++i) {
    if (h[i] == other[i] || (std::isnan(h[i]) && std::isnan(other[i]))) continue;
    const T size = std::max(T(1), std::abs(other[i])), off = std::abs(h[i] - other[i]);
    if (!(off <= near * size && std::isfinite(off))) return false;
    most = std::max(most, off / size);
  }
  apart = most;
  return true;
}

void at_least(long long* to, long long value) {
  *to = std::max(*to, value);
}
int bits(float x) {
  int found;
  std::memcpy(&found, &x, 4);
  return found;
}

// Where the chunks of channel n should start; which of them that moves is in `active`. True where any does.
template <typename T>
bool correct(const Chunks<T>& c, int64_t n, char* active, int round) {
  const int64_t S = c.S;
  T start[kMaxStates], next[kMaxStates], began[kMaxStates];
  bool any = false;
  for (int64_t i = 0; i < S; ++i) start[i] = c.end(0, i, n);
  for (int64_t k = 1; k < c.a.chunks; ++k) {
    T apart = 0;
    for (int64_t i = 0; i < S; ++i) began[i] = c.start(k, i, n);
    const bool stays = meets(start, began, S, apart);
    bool finite = true;
    for (int64_t i = 0; i < S; ++i) {
      next[i] = c.end(k, i, n);
      for (int64_t j = 0; j < S; ++j) next[i] += c.derivative(k, i * S + j, n) * (start[j] - began[j]);
      finite = finite && std::isfinite(next[i]);
    }
    active[k * c.a.N + n] = !stays;
    any = any || !stays;
    for (int64_t i = 0; i < S; ++i) {
      if (!stays) c.start(k, i, n) = start[i];
      start[i] = stays || !finite ? c.end(k, i, n) : next[i];
    }
    if (c.a.statistics == nullptr) continue;
    long long* row = c.a.statistics + 4 * n;
    if (stays) {
      at_least(row + 2, bits(static_cast<float>(apart)));
    } else {
      at_least(row, round);
    }
  }
  return any;
}

template <typename T>
void mend(const Runner& runner, PointwiseWalk walk, PointwiseJob job, const Pointwise& p, PointwiseArgs& a) {
  const Chunks<T> chunks{a, p.step->states};
  std::vector<char> active(static_cast<size_t>(a.chunks * a.N));
  job.active = active.data();
  for (int round = 2; round <= kPointwiseRounds; ++round) {
    std::atomic<bool> any{false};
    runner.channels([&](int64_t first, int64_t end) {
      for (int64_t n = first; n < end; ++n) {
        if (correct(chunks, n, active.data(), round)) any = true;
      }
    });
    if (!any) return;
    runner.blocks(walk, job);
  }
  // The rest in order, chunk after chunk.
  job.jacobian = nullptr;
  runner.channels([&](int64_t first, int64_t end) {
    for (int64_t block = first; block < end; block += kPointwiseBlock) {
      const int64_t count = std::min(kPointwiseBlock, end - block);
      for (int64_t k = 1; k < a.chunks; ++k) {
        for (int64_t n = block; n < block + count; ++n) {
          T start[kMaxStates], began[kMaxStates], apart = 0;
          for (int64_t i = 0; i < chunks.S; ++i) {
            start[i] = chunks.end(k - 1, i, n);
            began[i] = chunks.start(k, i, n);
          }
          const bool moves = !meets(start, began, chunks.S, apart);
          active[k * a.N + n] = moves;
          for (int64_t i = 0; i < chunks.S && moves; ++i) chunks.start(k, i, n) = start[i];
          if (moves && a.statistics != nullptr) {
            at_least(a.statistics + 4 * n, kPointwiseRounds + 1);
            a.statistics[4 * n + 3] = 1;
          }
        }
        runner.run(walk, job, {block, count, k, 1});
      }
    }
  });
}

at::Tensor room(const Pointwise& p, at::IntArrayRef sizes) {
  return at::empty(sizes, p.init[0].options().dtype(p.acc));
}

// Workspaces of the chunks, in `a`.
std::vector<at::Tensor> workspaces(const Pointwise& p, const PointwisePlan& plan, PointwiseArgs& a) {
  const int64_t S = p.step->states;
  std::vector<at::Tensor> made = {room(p, {plan.chunks, S, p.N}), room(p, {plan.chunks, S, p.N}),
                                  room(p, {plan.chunks, S * S, p.N})};
  a.starts = made[0].mutable_data_ptr();
  a.ends = made[1].mutable_data_ptr();
  a.derivatives = made[2].mutable_data_ptr();
  return made;
}

std::vector<at::Tensor> pointwise_forward_cpu(at::TensorList init, at::TensorList inputs, at::TensorList parameters,
                                              c10::string_view program, bool stacked, bool reverse,
                                              c10::string_view algorithm, c10::string_view name) {
  const Pointwise p = check_pointwise("pointwise_scan", init, inputs, parameters, program, stacked, reverse, algorithm);
  const StepProgram& step = *p.step;
  std::vector<at::Tensor> states;
  for (int32_t i = 0; i < step.states; ++i) states.push_back(at::empty(p.states_shape(), init[0].options()));
  if (p.empty()) return states;
  const PointwisePlan plan = plan_on_cpu(p.T, p.N, p.chunks_allowed, p.chunks_wanted);
  std::vector<at::Tensor> kept;
  PointwiseArgs a = describe_pointwise(p, plan, kept);
  for (int32_t i = 0; i < step.states; ++i) a.states[i] = states[i].mutable_data_ptr();
  const Runner runner(p, plan);
  const PointwiseWalk walk = cpu::pointwise_kernels().forward[type_of(p.dtype)];
  if (plan.chunks == 1) {
    const Code code(step, step.next);
    runner.blocks(walk, job_of(a, step, code, step.next));
    return states;
  }
  const Code code(step, joined(step.next, step.jacobian));
  PointwiseJob job = job_of(a, step, code, step.next);
  job.jacobian = step.jacobian.data();
  const std::vector<at::Tensor> rooms = workspaces(p, plan, a);
  at::Tensor marks, statistics;
  if (init[0].element_size() == 2) {
    marks = room(p, {ceil_div(p.T, kPointwiseBatch), step.states, p.N});
    a.marks = marks.mutable_data_ptr();
  }
  NewtonReport* report = newton_report();
  if (report != nullptr) {
    statistics = at::zeros({p.N, 4}, init[0].options().dtype(at::kLong));
    a.statistics = static_cast<long long*>(statistics.mutable_data_ptr());
  }
  for (int32_t i = 0; i < step.states; ++i) {
    const at::Tensor wide = init[i].reshape({p.N}).to(p.acc);
    for (int64_t c = 0; c < plan.chunks; ++c) rooms[0][c][i].copy_(wide);
  }
  runner.blocks(walk, job);
  by_acc(p.acc, [&](auto zero) { mend<decltype(zero)>(runner, walk, job, p, a); });
  if (report != nullptr) report->runs.push_back({std::string(name), p.T, plan.chunks, statistics});
  return states;
}

// What each chunk of channel n is given by those after it, in `starts`; whether that is anything, in `active`. False
// where it overflows on the way.
template <typename T>
bool hand_on(const Chunks<T>& c, int64_t n, char* active) {
  const int64_t S = c.S;
  T carry[kMaxStates] = {}, next[kMaxStates];
  bool all_finite = true;
  for (int64_t k = c.a.chunks - 1; k >= 0; --k) {
    bool any = false;
    for (int64_t i = 0; i < S; ++i) {
      c.start(k, i, n) = carry[i];
      any = any || carry[i] != T(0);
      next[i] = c.end(k, i, n);
      for (int64_t j = 0; j < S && k < c.a.chunks - 1; ++j) next[i] += c.derivative(k, i * S + j, n) * carry[j];
    }
    active[k * c.a.N + n] = any;
    for (int64_t i = 0; i < S; ++i) {
      carry[i] = next[i];
      all_finite = all_finite && (k == 0 || std::isfinite(carry[i]));
    }
  }
  return all_finite;
}

template <typename T>
void correct_gradients(const Runner& runner, PointwiseWalk walk, PointwiseJob job, const Pointwise& p,
                       const PointwiseArgs& a) {
  const Chunks<T> chunks{a, p.step->states};
  std::vector<char> active(static_cast<size_t>(a.chunks * a.N)), fallen(active.size());
  std::atomic<bool> any_fallen{false};
  runner.channels([&](int64_t first, int64_t end) {
    for (int64_t n = first; n < end; ++n) {
      if (hand_on(chunks, n, active.data())) continue;
      any_fallen = true;
      for (int64_t k = 0; k < a.chunks; ++k) {
        active[k * a.N + n] = 0;
        fallen[k * a.N + n] = 1;
      }
    }
  });
  job.jacobian = nullptr;
  job.active = active.data();
  runner.blocks(walk, job);
  if (!any_fallen) return;
  // In one piece.
  job.active = fallen.data();
  job.whole = true;
  runner.channels([&](int64_t first, int64_t end) {
    for (int64_t block = first; block < end; block += kPointwiseBlock) {
      const int64_t count = std::min(kPointwiseBlock, end - block);
      for (int64_t k = a.chunks - 1; k >= 0; --k) {
        for (int64_t n = block; n < block + count; ++n) {
          for (int64_t i = 0; i < chunks.S; ++i) {
            chunks.start(k, i, n) = k == a.chunks - 1 ? T(0) : chunks.end(k + 1, i, n);
          }
        }
        runner.run(walk, job, {block, count, k, 1});
      }
    }
  });
}

std::vector<at::Tensor> pointwise_backward_cpu(const OptionalTensors& grads, at::TensorList init, at::TensorList inputs,
                                               at::TensorList parameters, at::TensorList states,
                                               c10::string_view program, bool stacked, bool reverse,
                                               c10::string_view algorithm, c10::List<bool> output_mask) {
  const Pointwise p =
      check_pointwise("pointwise_scan_backward", init, inputs, parameters, program, stacked, reverse, algorithm);
  const StepProgram& step = *p.step;
  const PointwisePlan plan = plan_on_cpu(p.T, p.N, p.chunks_allowed, p.chunks_wanted);
  std::vector<at::Tensor> kept;
  PointwiseArgs a = describe_pointwise(p, plan, kept);
  PointwiseGradients gradients(p, grads, states, output_mask, plan, a, kept);
  if (p.empty()) return gradients.results();
  const bool chunked = plan.chunks > 1;
  const Code code(step, chunked ? joined(step.vjp, step.jacobian) : step.vjp);
  PointwiseJob job = job_of(a, step, code, step.vjp);
  job.wanted = gradients.wanted();
  job.given = gradients.given();
  const Runner runner(p, plan);
  const PointwiseWalk walk = cpu::pointwise_kernels().backward[type_of(p.dtype)];
  std::vector<at::Tensor> rooms;
  if (chunked) {
    rooms = workspaces(p, plan, a);
    job.jacobian = step.jacobian.data();
  }
  runner.blocks(walk, job);
  if (chunked) by_acc(p.acc, [&](auto zero) { correct_gradients<decltype(zero)>(runner, walk, job, p, a); });
  return gradients.results();
}

}  // namespace

PointwisePlan plan_on_cpu(int64_t T, int64_t N, bool allowed, bool wanted) {
  return plan_pointwise(T, N, kPointwiseBatch, kBusy, allowed, wanted);
}

TORCH_LIBRARY_IMPL(weft, CPU, m) {
  m.impl("pointwise_scan", pointwise_forward_cpu);
  m.impl("pointwise_scan_backward", pointwise_backward_cpu);
}

}  // namespace weft::scan
