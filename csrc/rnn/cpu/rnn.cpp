// weft::rnn on the CPU: types, how a team divides the work, packing. The arithmetic is in rnn_kernels-inl.h.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "rnn/newton/cpu/newton.h"
#include "rnn/newton/report.h"
#include "rnn/persistent/cpu/rnn_kernels.h"
#include "rnn/persistent/cpu/team.h"
#include "rnn/rnn.h"
#include "rnn/rnn_reference.h"

namespace weft::rnn {

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

template <typename T>
const RnnKernels<T>& kernels() {
  if constexpr (std::is_same_v<T, float>) {
    return cpu::rnn_kernels().f32;
  } else {
    return cpu::rnn_kernels().f64;
  }
}

Tensor compute_copy(const Tensor& t, at::ScalarType type) {
  return t.defined() ? t.to(type).contiguous() : t;
}

Tensor compute_copy(const OptionalTensor& t, at::ScalarType type) {
  return t ? compute_copy(*t, type) : Tensor();
}

// Data of a tensor from `offset` on; null for one that is not there.
template <typename T>
const T* pointer(const Tensor& t, int64_t offset = 0) {
  return t.defined() ? t.const_data_ptr<T>() + offset : nullptr;
}

template <typename T>
T* mutable_pointer(const Tensor& t, int64_t offset = 0) {
  return t.defined() && t.numel() > 0 ? t.mutable_data_ptr<T>() + offset : nullptr;
}

// Asks for huge pages for fresh memory: touching a page for the first time takes longer than filling it, and large
// tensors are returned to the system when they are freed.
void prefer_huge_pages(const Tensor& t) {
#ifdef __linux__
  constexpr uintptr_t kPage = 2 << 20;
  const auto begin = reinterpret_cast<uintptr_t>(t.data_ptr());
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage, last = (begin + t.nbytes()) / kPage * kPage;
  // Where the system has none to give nothing changes.
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

// A line of the cache between what different threads write.
int64_t padded(int64_t count) {
  return (count + 31) / 16 * 16;
}

// Threads of a direction: batch groups times slices of the hidden units.
struct Grid {
  int groups = 1, slices = 1;
};

// What a step of one sequence costs: vector multiply-adds per panel, by the weights that are read again at each step
// and by those that serve all steps of a chunk.
struct StepDepth {
  int64_t recurrent, input;
};

// Cycles of a step on the thread that has most to do.
double step_cycles(double rows, int64_t panels, StepDepth depth, int64_t vector_bytes, int slices) {
  // Weights come from L1, L2 or L3; a row of them is loaded once per block of rows.
  const int64_t bytes = panels * depth.recurrent * vector_bytes;
  const double bandwidth = bytes < 32 << 10 ? 64 : bytes < 700 << 10 ? 24 : 10;
  const double products =
      double(depth.recurrent) * std::max(rows / 2, double(vector_bytes) / bandwidth) + double(depth.input) * rows / 2;
  const double cycles = double(panels) * (products + rows * 100);
  // Slices meet at every step: beside the meeting itself, a thread that loses its processor holds up all of them.
  // Groups of sequences never wait, so that slices must win by a margin.
  return slices > 1 ? 1.2 * cycles + 200 + 40 * slices : cycles;
}

Grid choose_grid(const RnnSizes& s, StepDepth depth, int64_t lanes, int64_t element_bytes, int threads) {
  const int64_t panels = (s.H + lanes - 1) / lanes;
  const double batch = double(s.R) / double(s.T);  // of packed data: sequences that run on average
  Grid best;
  double least = 0;
  for (int slices = 1; slices <= std::min<int64_t>({threads, panels, kSlices}); ++slices) {
    const int groups = static_cast<int>(std::min<int64_t>(threads / slices, s.B));
    const double rows = std::max(1.0, s.packed ? batch / groups : double((s.B + groups - 1) / groups));
    const double cycles = step_cycles(rows, (panels + slices - 1) / slices, depth, lanes * element_bytes, slices);
    if (slices == 1 || cycles < least) {
      best = {groups, slices};
      least = cycles;
    }
  }
  return best;
}

// Rows of a task of a product over all steps, at most.
constexpr int64_t kTaskRows = 128;

// A head of a direction is a recurrence of its own: as if it were a direction of a layer of P units.
int recurrences(const RnnSizes& s) {
  return s.D * static_cast<int>(s.heads);
}
RnnSizes of_a_head(RnnSizes s) {
  s.D = recurrences(s);
  s.H = s.P;
  return s;
}

// As many as run side by side, such that none has to wait for threads: what divides their number.
int at_once_of(int count, int threads) {
  int found = std::min(count, threads);
  while (count % found != 0) --found;
  return found;
}

// Who does what. Members [0, directions at once * parts) run the recurrences; all share what has no recurrence. Sizes
// are those of_a_head.
struct Team {
  int members, at_once;        // threads of the team, directions that run side by side
  int slices;                  // of each batch group
  int slice_members;           // of each batch group, at the beginning of a pass
  std::vector<RnnPart> parts;  // of one direction, a group's slices next to each other
  std::vector<Arrivals> arrivals;
  std::vector<Wish> wishes;  // of each batch group
  Barrier everyone;
  std::vector<int64_t> handed_out;  // tasks of each product over all steps, which members take as they get free

  Team(const RnnSizes& s, const RnnSteps& steps, StepDepth depth, int64_t lanes, int64_t element_bytes, int team)
      : members(team), at_once(at_once_of(s.D, team)), handed_out(1 + 2 * s.D) {
    const Grid grid = choose_grid(s, depth, lanes, element_bytes, team / at_once);
    arrivals.resize(team + s.D * grid.groups * grid.slices);
    wishes.resize(s.D * grid.groups);
    everyone = {arrivals.data(), team};
    const int64_t panels = (s.H + lanes - 1) / lanes;
    slices = grid.slices;
    slice_members = crew_members(slices);
    int64_t b = 0, rows = 0;
    for (int group = 0; group < grid.groups; ++group) {
      // Groups of equal work: the lengths of a group's sequences add up to its share of all rows.
      const int64_t begin = b, share = s.R * (group + 1) / grid.groups;
      const int64_t most = s.B - (grid.groups - 1 - group);
      while (b < most && (b == begin || rows + steps.lengths[b] / 2 < share)) rows += steps.lengths[b++];
      if (group + 1 == grid.groups) b = s.B;
      for (int slice = 0; slice < grid.slices; ++slice) {
        const Range own = split(panels, grid.slices, slice);
        parts.push_back({begin, b, own.begin, own.end});
      }
    }
  }

  // The next task of a product.
  int64_t take(int product) { return __atomic_fetch_add(&handed_out[product], 1, __ATOMIC_RELAXED); }

  // Calls f(direction, part, index) for the part with which a member begins in each of its directions of
  // [first_direction, D): index counts the parts of directions that run at once.
  template <typename F>
  void own_parts(int D, int member, F f, int first_direction = 0) const {
    const int count = static_cast<int>(parts.size());
    for (int d = first_direction; d < D; ++d) {
      const int first = d % at_once * count;
      if (member >= first && member < first + count) f(d, parts[member - first], member);
    }
  }

  // Calls f(direction, group) for the groups that a member runs, with part_scratch(index) for each of their parts.
  template <typename T, typename Scratch, typename F>
  void run_groups(int D, int member, Scratch part_scratch, F f) {
    const auto run = [&](int d, const RnnPart& part, int index) {
      const int count = static_cast<int>(parts.size());
      const int own = static_cast<int>(&part - parts.data()), slice = own % slices, first = own - slice;
      Arrivals* const at = arrivals.data() + members + d * count + first;
      Wish* const wish = &wishes[(d * count + first) / slices];
      RnnGroup<T> group{&parts[first], {}, Crew(at, wish, slices, slice_members, slice)};
      for (int i = 0; i < slices; ++i) group.scratch[i] = part_scratch(index - slice + i);
      f(d, group);
    };
    for (int first = 0; first < D; first += at_once) {
      // Whoever runs a slice of another member uses that one's scratch until the end.
      if (first > 0 && slices > 1) everyone.wait(member);
      own_parts(first + at_once, member, run, first);
    }
  }
};

// A team is worth waking for about 10 us of work, two multiply-adds a cycle.
int wanted_members(const RnnSizes& s, StepDepth depth, int64_t lanes) {
  const int64_t panels = (s.H + lanes - 1) / lanes;
  const double cycles = double(s.D) * double(s.R) * double(panels) * (double(depth.recurrent + depth.input) / 2 + 100);
  return static_cast<int>(std::clamp<double>(cycles / 30000, 1, team_limit()));
}

// Runs work(team, member) on a team, or alone where there are fewer threads than that.
template <typename Prepare, typename Work>
void run_on_team(const RnnSizes& s, const RnnSteps& steps, StepDepth depth, int64_t lanes, int64_t element_bytes,
                 Prepare prepare, Work work) {
  for (int members = wanted_members(s, depth, lanes);; members = 1) {
    Team team(s, steps, depth, lanes, element_bytes, members);
    const auto memory = prepare(team);
    if (run_team(members, [&](int member) { work(team, memory, member); })) return;
  }
}

// Pieces of one allocation.
struct Memory {
  Tensor data;
  std::vector<int64_t> offsets;
};
Memory allocate(const std::vector<int64_t>& counts, const at::TensorOptions& options) {
  Memory memory;
  int64_t total = 0;
  for (const int64_t count : counts) {
    memory.offsets.push_back(total);
    total += padded(count);
  }
  memory.data = at::empty({total}, options);
  prefer_huge_pages(memory.data);
  return memory;
}

template <typename T>
void forward(const RnnArgs& args, const RnnSizes& s, const RnnSteps& steps, const RnnResults& results) {
  const auto& k = kernels<T>();
  const auto type = c10::CppTypeToScalarType<T>::value;
  const Tensor input = compute_copy(args.input, type), h0 = compute_copy(args.h0, type),
               c0 = compute_copy(args.c0, type);
  std::array<RnnWeights, 2> weights;
  for (int d = 0; d < s.D; ++d) {
    const RnnWeights w = rnn_weights(args, s, d);
    weights[d] = {compute_copy(w.w_ih, type), compute_copy(w.w_hh, type), compute_copy(w.b_ih, type),
                  compute_copy(w.b_hh, type)};
  }
  const RnnSizes own = of_a_head(s);
  const int64_t states = s.B * s.H, stride = k.state_stride(s.P);
  const auto arguments = [&](int run) {
    const int d = run / static_cast<int>(s.heads);
    const int64_t first = run % s.heads * s.P;
    return RnnForwardArgs<T>{{args.cell, d == 1, s.packed, s.T, s.B, s.I, s.P, s.H, s.D * s.H, steps.offsets.data()},
                             pointer<T>(input),
                             pointer<T>(h0, d * states + first),
                             pointer<T>(c0, d * s.S * states + first),
                             nullptr,
                             nullptr,
                             pointer<T>(weights[d].b_ih, first),
                             pointer<T>(weights[d].b_hh, first),
                             results.output.mutable_data_ptr<T>() + d * s.H + first,
                             results.h_n.mutable_data_ptr<T>() + d * states + first,
                             mutable_pointer<T>(results.c_n, d * s.S * states + first),
                             mutable_pointer<T>(results.gates, d * s.R * 4 * s.H + first),
                             mutable_pointer<T>(results.cells, d * s.K * s.H + first)};
  };
  const auto packing = [&](int run, bool recurrent, int slices) {
    const RnnWeights& of = weights[run / s.heads];
    const Tensor& w = recurrent ? of.w_hh : of.w_ih;
    const int64_t depth = w.size(1), first = run % s.heads * s.P;
    return PackArgs<T>{.data = w.const_data_ptr<T>() + first * depth,
                       .depth = depth,
                       .depth_stride = 1,
                       .column_stride = depth,
                       .rotate = 0,
                       .run = depth,
                       .run_apart = depth,
                       .depth_block = recurrent ? depth : kDepthBlock,
                       .blocks = s.G,
                       .columns = s.P,
                       .apart = s.H,
                       .slices = slices,
                       .packed = nullptr};
  };

  // Memory: for each recurrence w_ih, w_hh and the state; then the scratch of each member's part.
  const auto prepare = [&](Team& team) {
    std::vector<int64_t> counts;
    for (int d = 0; d < own.D; ++d) {
      counts.push_back(k.packed_size(packing(d, false, team.slices)));
      counts.push_back(k.packed_size(packing(d, true, team.slices)));
      counts.push_back(2 * s.B * stride);
    }
    for (int member = 0; member < team.members; ++member) {
      int64_t most = 0;
      team.own_parts(own.D, member, [&](int d, const RnnPart& part, int) {
        most = std::max(most, k.forward_scratch(arguments(d), part));
      });
      counts.push_back(most);
    }
    return allocate(counts, input.options());
  };
  const auto work = [&](Team& team, const Memory& memory, int member) {
    T* const base = static_cast<T*>(memory.data.mutable_data_ptr());
    const auto at = [&](int index) { return base + memory.offsets[index]; };
    for (int d = 0; d < own.D; ++d) {
      for (int which = 0; which < 2; ++which) {
        auto pack = packing(d, which == 1, team.slices);
        pack.packed = at(3 * d + which);
        k.pack(pack, member, team.members);
      }
    }
    team.own_parts(own.D, member,
                   [&](int d, const RnnPart& part, int) { k.forward_begin(arguments(d), part, at(3 * d + 2)); });
    team.everyone.wait(member);
    const auto scratch = [&](int index) { return at(3 * own.D + index); };
    team.run_groups<T>(own.D, member, scratch, [&](int d, const RnnGroup<T>& group) {
      auto arguments_of = arguments(d);
      arguments_of.w_ih = at(3 * d);
      arguments_of.w_hh = at(3 * d + 1);
      k.forward(arguments_of, group, at(3 * d + 2));
    });
  };
  run_on_team(own, steps, {s.G * s.P, s.G * s.I}, k.lanes, sizeof(T), prepare, work);
}

// The rows before each row of a direction, pointers to its states: null where the state is zero.
template <typename T>
std::vector<const T*> states_before(const RnnSizes& s, const RnnSteps& steps, int d, const T* output, const T* h0) {
  std::vector<const T*> rows(s.R);
  for_each_row(s, steps, d, [&](int64_t row, int64_t before, int64_t b) {
    const T* const first = h0 == nullptr ? nullptr : h0 + b * s.H;
    rows[row] = before < 0 ? first : output + before * s.D * s.H;
  });
  return rows;
}

template <typename T>
std::vector<Tensor> backward(const RnnGrads& grads, const RnnArgs& args, const RnnSizes& s, const RnnSteps& steps,
                             const Tensor& output_, const Tensor& cells_, const Tensor& gates_,
                             const c10::List<bool>& mask) {
  const auto& k = kernels<T>();
  const auto type = c10::CppTypeToScalarType<T>::value;
  const Tensor input = compute_copy(args.input, type), h0 = compute_copy(args.h0, type),
               c0 = compute_copy(args.c0, type), output = compute_copy(output_, type),
               cells = compute_copy(cells_, type), gates = compute_copy(gates_, type),
               grad_output = compute_copy(grads.output, type), grad_h_n = compute_copy(grads.h_n, type),
               grad_c_n = compute_copy(grads.c_n, type), grad_cells = compute_copy(grads.cells, type);
  const auto options = input.options();
  std::vector<Tensor> result(mask.size());
  const auto want = [&](size_t index, at::IntArrayRef shape) {
    if (mask[index]) result[index] = at::empty(shape, options);
  };
  want(0, input.sizes());
  if (h0.defined()) want(1, h0.sizes());
  if (c0.defined()) want(2, c0.sizes());
  std::array<RnnWeights, 2> weights;
  for (int d = 0; d < s.D; ++d) {
    const RnnWeights w = rnn_weights(args, s, d);
    weights[d] = {result[0].defined() ? compute_copy(w.w_ih, type) : Tensor(), compute_copy(w.w_hh, type), {}, {}};
    for (int i = 0; i < (s.bias ? 4 : 2); ++i) {
      want(rnn_first_weight(s, d) + i, args.weights[rnn_first_weight(s, d) - 3 + i].sizes());
    }
  }

  if (result[0].defined()) prefer_huge_pages(result[0]);

  const bool apart = sides_apart(args.cell);
  // Of each recurrence.
  const RnnSizes own = of_a_head(s);
  const int64_t states = s.B * s.H, M = s.G * s.P;
  const int64_t d_columns = chain_blocks(args.cell) * s.P;
  // Rows a power of two apart would share few sets of L1.
  const int64_t d_stride = padded(d_columns);
  const auto direction_of = [&](int run) { return run / static_cast<int>(s.heads); };
  const auto first_of = [&](int run) { return run % s.heads * s.P; };
  std::vector<std::vector<const T*>> before(own.D);
  for (int run = 0; run < own.D; ++run) {
    const int d = direction_of(run);
    if (result[rnn_first_weight(s, d) + 1].defined()) {
      before[run] = states_before<T>(s, steps, d, pointer<T>(output, d * s.H + first_of(run)),
                                     pointer<T>(h0, d * states + first_of(run)));
    }
  }
  const auto arguments = [&](int run) {
    const int d = direction_of(run);
    const int64_t first = first_of(run);
    return RnnBackwardArgs<T>{{args.cell, d == 1, s.packed, s.T, s.B, s.I, s.P, s.H, s.D * s.H, steps.offsets.data()},
                              pointer<T>(grad_output, d * s.H + first),
                              pointer<T>(grad_h_n, d * states + first),
                              pointer<T>(grad_c_n, d * s.S * states + first),
                              pointer<T>(grad_cells, d * s.K * s.H + first),
                              pointer<T>(h0, d * states + first),
                              pointer<T>(c0, d * s.S * states + first),
                              pointer<T>(output, d * s.H + first),
                              gates.numel() > 0 ? pointer<T>(gates, d * s.R * 4 * s.H + first) : nullptr,
                              cells.numel() > 0 ? pointer<T>(cells, d * s.K * s.H + first) : nullptr,
                              nullptr,
                              nullptr,
                              d_stride,
                              mutable_pointer<T>(result[1], d * states + first),
                              mutable_pointer<T>(result[2], d * s.S * states + first)};
  };
  // The input side's columns of dgates begin with those of a gate whose sides stay apart, the last block of w_ih.
  const int64_t rotate = apart ? (s.G - 1) * s.P : 0;
  // Rows of a head's weights: the P of each gate lie H apart.
  const int64_t run_rows = s.heads == 1 ? M : s.P, run_apart = s.heads == 1 ? M : s.H;
  const auto packing = [&](int run, bool recurrent, int slices) {
    const RnnWeights& of = weights[direction_of(run)];
    const Tensor& w = recurrent ? of.w_hh : of.w_ih;
    const int64_t columns = w.size(1);
    return PackArgs<T>{.data = w.const_data_ptr<T>() + first_of(run) * columns,
                       .depth = M,
                       .depth_stride = columns,
                       .column_stride = 1,
                       .rotate = recurrent ? 0 : rotate,
                       .run = run_rows,
                       .run_apart = run_apart,
                       .depth_block = recurrent ? M : kDepthBlock,
                       .blocks = 1,
                       .columns = columns,
                       .apart = columns,
                       .slices = recurrent ? slices : 1,
                       .packed = nullptr};
  };

  // Memory: for each recurrence w_ih, w_hh and dgates; then the scratch of each member's part, and later of the member.
  const auto prepare = [&](Team& team) {
    std::vector<int64_t> counts;
    for (int d = 0; d < own.D; ++d) {
      counts.push_back(result[0].defined() ? k.packed_size(packing(d, false, 1)) : 0);
      counts.push_back(k.packed_size(packing(d, true, team.slices)));
      counts.push_back(s.R * d_stride);
    }
    for (int member = 0; member < team.members; ++member) {
      int64_t most = k.transposed_scratch();
      team.own_parts(own.D, member, [&](int d, const RnnPart& part, int) {
        most = std::max(most, k.backward_scratch(arguments(d), part));
      });
      counts.push_back(most);
    }
    return allocate(counts, options);
  };
  const auto work = [&](Team& team, const Memory& memory, int member) {
    T* const base = static_cast<T*>(memory.data.mutable_data_ptr());
    const auto at = [&](int index) { return base + memory.offsets[index]; };
    const auto scratch = [&](int index) { return at(3 * own.D + index); };
    for (int d = 0; d < own.D; ++d) {
      for (int which = result[0].defined() ? 0 : 1; which < 2; ++which) {
        auto pack = packing(d, which == 1, team.slices);
        pack.packed = at(3 * d + which);
        k.pack(pack, member, team.members);
      }
    }
    team.everyone.wait(member);
    team.run_groups<T>(own.D, member, scratch, [&](int d, const RnnGroup<T>& group) {
      auto arguments_of = arguments(d);
      arguments_of.w_hh = at(3 * d + 1);
      arguments_of.dgates = at(3 * d + 2);
      k.backward(arguments_of, group);
    });
    team.everyone.wait(member);
    if (result[0].defined()) {
      const int64_t share = (s.R + team.members - 1) / team.members;
      const int64_t rows = std::min(kTaskRows, (share + 7) / 8 * 8), tasks = (s.R + rows - 1) / rows;
      for (int64_t task; (task = team.take(0)) < tasks;) {
        for (int d = 0; d < own.D; ++d) {
          k.multiply({at(3 * d + 2), d_stride, M, kDepthBlock, at(3 * d), result[0].mutable_data_ptr<T>(), s.I, d > 0},
                     task * rows, std::min(s.R, (task + 1) * rows));
        }
      }
    }
    for (int d = 0; d < own.D; ++d) {
      const T* const dgates = at(3 * d + 2);
      const int first = rnn_first_weight(s, direction_of(d));
      // The head's first row, of so many columns.
      const auto grad = [&](int which, int64_t columns) {
        return which < (s.bias ? 4 : 2) ? mutable_pointer<T>(result[first + which], first_of(d) * columns) : nullptr;
      };
      // Each task packs all of the right side: not more of them than what the packing is small beside.
      const int tasks = static_cast<int>(std::clamp<int64_t>(M / 256, team.members, 4 * team.members));
      const auto transposed = [&](int product, const TransposedArgs<T>& product_args) {
        if (product_args.out == nullptr && product_args.sums == nullptr) return;  // nobody asks
        for (int64_t task; (task = team.take(product)) < tasks;) {
          k.transposed(product_args, static_cast<int>(task), tasks, scratch(member));
        }
      };
      transposed(1 + 2 * d, {dgates, d_stride, s.R, M, rotate, run_rows, run_apart, pointer<T>(input), nullptr, s.I,
                             s.I, grad(0, s.I), grad(2, 1)});
      transposed(2 + 2 * d, {dgates + (apart ? s.P : 0), d_stride, s.R, M, 0, run_rows, run_apart, nullptr,
                             before[d].data(), 0, s.P, grad(1, s.P), grad(3, 1)});
    }
  };
  run_on_team(own, steps, {s.G * s.P, 0}, k.lanes, sizeof(T), prepare, work);

  for (Tensor& t : result) {
    t = t.defined() ? t.to(args.input.scalar_type()) : at::empty({0}, args.input.options());
  }
  return result;
}

bool has_work(const RnnSizes& s) {
  return s.R > 0 && s.I > 0 && s.H > 0;
}

// The forward pass step by step, in the accumulate type.
RnnResults in_order(const RnnArgs& args, const RnnSizes& sizes, bool keep_cells, bool save) {
  const RnnSteps steps = rnn_steps(args, sizes);
  const auto compute = accumulate_type(args.input.scalar_type());
  const RnnResults r = allocate_rnn(args, sizes, keep_cells, save, compute, compute);
  for (const Tensor& t : {r.output, r.cells, r.gates}) prefer_huge_pages(t);
  (compute == at::kDouble ? forward<double> : forward<float>)(args, sizes, steps, r);
  return r;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> rnn_cpu(const Tensor& input, const OptionalTensor& h0,
                                                           const OptionalTensor& c0, at::TensorList weights,
                                                           const OptionalTensor& batch_sizes,
                                                           c10::string_view cell_name, bool bidirectional,
                                                           bool keep_cells, bool save, c10::string_view backward_name,
                                                           int64_t heads) {
  const char* op = "weft::rnn";
  const RnnArgs args{
      input, h0, c0, weights, batch_sizes, parse_cell(op, cell_name), bidirectional, parse_backward(op, backward_name),
      heads};
  const RnnSizes sizes = check_rnn(op, args);
  if (!has_work(sizes)) return rnn_reference(args, sizes, keep_cells, save).tuple();
  // Of cells with a scan, which the backward pass is.
  const bool newton = args.backward == Backward::kNewton && heads == 1 && scan_max_hidden(args.cell) > 0;
  const int64_t chunks = newton ? newton_chunks_cpu(sizes) : 1;
  const RnnResults r = chunks > 1 ? newton_forward_cpu(args, sizes, chunks, keep_cells, save, in_order)
                                  : in_order(args, sizes, keep_cells, save);
  if (newton && chunks == 1 && !sizes.packed) newton_statistics(args, sizes, 1);
  const auto type = input.scalar_type(), saved = args.saved_type();
  return {r.output.to(type), r.h_n.to(type), r.c_n.to(type), r.cells.to(saved), r.gates.to(saved)};
}

std::vector<Tensor> rnn_backward_cpu(const OptionalTensor& grad_output, const OptionalTensor& grad_h_n,
                                     const OptionalTensor& grad_c_n, const OptionalTensor& grad_cells,
                                     const Tensor& input, const OptionalTensor& h0, const OptionalTensor& c0,
                                     at::TensorList weights, const OptionalTensor& batch_sizes, const Tensor& output,
                                     const Tensor& cells, const Tensor& gates, c10::string_view cell_name,
                                     bool bidirectional, c10::List<bool> output_mask, c10::string_view backward_name,
                                     int64_t heads) {
  const char* op = "weft::rnn_backward";
  const RnnArgs args{
      input, h0, c0, weights, batch_sizes, parse_cell(op, cell_name), bidirectional, parse_backward(op, backward_name),
      heads};
  const RnnGrads grads{grad_output, grad_h_n, grad_c_n, grad_cells};
  const RnnSizes sizes = check_rnn(op, args);
  check_rnn_saved(op, args, sizes, grads, output, cells, gates, output_mask);
  if (!has_work(sizes)) return rnn_backward_reference(grads, args, sizes, output_mask);
  const RnnSteps steps = rnn_steps(args, sizes);
  const auto run = accumulate_type(input.scalar_type()) == at::kDouble ? backward<double> : backward<float>;
  return run(grads, args, sizes, steps, output, cells, gates, output_mask);
}

TORCH_LIBRARY_IMPL(weft, CPU, m) {
  m.impl("rnn", &rnn_cpu);
  m.impl("rnn_backward", &rnn_backward_cpu);
}

}  // namespace
}  // namespace weft::rnn
