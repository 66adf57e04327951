#include "rnn/newton/cpu/newton.h"

#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "rnn/newton/chunks.h"
#include "rnn/newton/forced.h"
#include "rnn/newton/report.h"

namespace weft::rnn {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Rows that the kernel multiplies at once, and the fewest steps of a chunk.
constexpr int64_t kRowsAtOnce = 8, kShortest = 64;
// Steps of a piece of what is walked again.
constexpr int64_t kPiece = 32;

// What the walks of one direction leave, steps in the order in which it takes them. cells and gates: undefined where
// the cell has none, or where nobody asks.
struct Walked {
  Tensor output, cells, gates;  // (T', B, H), (T', B, H), (T', B, 4 H), T' whole chunks
};

// One direction. x (T', B, I); h0 and c0 (1, B, H), c0 undefined where the cell has none.
template <typename T>
class Direction {
 public:
  Direction(const RnnArgs& args, const RnnSizes& s, int d, const TimeChunks& chunks, bool save, const Tensor& x,
            const Tensor& h0, const Tensor& c0, const WalkRows& walk)
      : cell_(args.cell),
        s_(s),
        chunks_(chunks),
        save_(save && has_gates(args.cell)),
        x_(x),
        h0_(h0),
        c0_(c0),
        walk_(walk) {
    const RnnWeights w = rnn_weights(args, s, d);
    for (const Tensor& t : {w.w_ih, w.w_hh, w.b_ih, w.b_hh}) {
      if (t.defined()) weights_.push_back(t.to(x.scalar_type()));
    }
  }

  // statistics: (B, 4), or null.
  Walked run(int64_t* statistics) {
    const int64_t K = chunks_.count, L = chunks_.length, B = s_.B, H = s_.H;
    const auto in_time = [&](const Tensor& rows, int64_t width) {
      if (rows.numel() == 0) return Tensor();
      return rows.view({L, K, B, width}).transpose(0, 1).reshape({K * L, B, width});
    };
    const auto starts = [&](const Tensor& first) {
      return first.defined() ? at::cat({first, at::zeros({1, (K - 1) * B, H}, first.options())}, 1) : Tensor();
    };
    const RnnResults all =
        rows(x_.view({K, L, B, s_.I}).transpose(0, 1).reshape({L, K * B, s_.I}), starts(h0_), starts(c0_));
    walked_ = {in_time(all.output, H), in_time(all.cells, H), in_time(all.gates, 4 * H)};
    for (int64_t b = 0; b < B; ++b) mend(b, statistics == nullptr ? nullptr : statistics + 4 * b);
    return walked_;
  }

 private:
  RnnResults rows(const Tensor& x, const Tensor& h, const Tensor& c) const {
    const OptionalTensor h0 = h, c0 = c.defined() ? OptionalTensor(c) : std::nullopt, packed;
    const RnnArgs args{x, h0, c0, weights_, packed, cell_, /*bidirectional=*/false, Backward::kScan};
    RnnSizes sizes = s_;
    sizes.T = x.size(0), sizes.B = x.size(1), sizes.R = sizes.T * sizes.B, sizes.D = 1;
    return walk_(args, sizes, has_c(cell_), save_);
  }

  int64_t steps_of(int64_t chunk) const { return std::min(chunks_.length, s_.T - chunk * chunks_.length); }

  struct State {
    std::vector<T> h, c;
  };
  const T* row_of(const Tensor& t, int64_t step, int64_t b) const {
    return t.const_data_ptr<T>() + (step * s_.B + b) * t.size(2);
  }
  State end_of(int64_t chunk, int64_t b) const {
    const int64_t step = std::min((chunk + 1) * chunks_.length, s_.T) - 1;
    const auto copy = [&](const Tensor& t) {
      return t.defined() ? std::vector<T>(row_of(t, step, b), row_of(t, step, b) + s_.H) : std::vector<T>();
    };
    return {copy(walked_.output), copy(walked_.cells)};
  }

  // The largest mismatch of two states; NaN stays.
  static T apart_from(const State& found, const State& stored) {
    T most = 0;
    for (const auto which : {&State::h, &State::c}) {
      for (size_t j = 0; j < (found.*which).size(); ++j) {
        const T each = mismatch((found.*which)[j], (stored.*which)[j]);
        if (!(each <= most)) most = each;
      }
    }
    return most;
  }

  // Chunks of sequence b that are walked again, each from a state, until they meet what is stored where they look for
  // it; whether their ends have changed.
  std::vector<char> again(int64_t b, std::vector<int64_t> chunks, const std::vector<State>& from, bool looks,
                          int64_t& redone, T& apart) {
    const int64_t H = s_.H;
    std::vector<char> changed(chunks.size(), 1);
    std::vector<size_t> index(chunks.size());  // of those that still walk
    for (size_t i = 0; i < index.size(); ++i) index[i] = i;
    const auto states = [&](std::vector<T> State::*which) {
      const Tensor t = at::empty({1, int64_t(from.size()), H}, x_.options());
      for (size_t i = 0; i < from.size(); ++i) std::copy_n((from[i].*which).data(), H, t.mutable_data_ptr<T>() + i * H);
      return t;
    };
    Tensor h = states(&State::h), c = has_c(cell_) ? states(&State::c) : Tensor();
    for (int64_t first = 0; !index.empty(); first += kPiece) {
      const int64_t steps = std::min(kPiece, chunks_.length - first), n = int64_t(index.size());
      const Tensor x = at::empty({steps, n, s_.I}, x_.options());
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t t = 0; t < steps; ++t) {
          std::copy_n(row_of(x_, chunks[index[i]] * chunks_.length + first + t, b), s_.I,
                      x.mutable_data_ptr<T>() + (t * n + i) * s_.I);
        }
      }
      const RnnResults r = rows(x, h, c);
      std::vector<int64_t> staying;
      std::vector<size_t> next;
      for (int64_t i = 0; i < n; ++i) {
        const int64_t chunk = chunks[index[i]], count = std::min(steps, steps_of(chunk) - first);
        int64_t t = 0;
        bool met = false;
        for (; t < count && !met; ++t) met = store(r, t, n, i, chunk * chunks_.length + first + t, b, looks, apart);
        redone += t;
        if (met) {
          changed[index[i]] = 0;
        } else if (first + count < steps_of(chunk)) {
          staying.push_back(i), next.push_back(index[i]);
        }
      }
      if (!next.empty()) {
        const Tensor rows_of = at::tensor(staying, at::kLong);
        h = r.output.narrow(0, steps - 1, 1).index_select(1, rows_of);
        if (has_c(cell_)) c = r.cells.narrow(0, steps - 1, 1).index_select(1, rows_of);
      }
      index = std::move(next);
    }
    return changed;
  }

  // Row i of n at step t of a piece, to where it belongs; or nothing, where it looks and meets what is stored there.
  bool store(const RnnResults& r, int64_t t, int64_t n, int64_t i, int64_t step, int64_t b, bool looks, T& apart) {
    const int64_t row = t * n + i, H = s_.H;
    const auto near = [&](const Tensor& found, const Tensor& stored) {
      const T *x = found.const_data_ptr<T>() + row * H, *y = row_of(stored, step, b);
      for (int64_t j = 0; j < H; ++j) {
        if (!meets(x[j], y[j])) return false;
      }
      return true;
    };
    const auto furthest = [&](const Tensor& found, const Tensor& stored) {
      T most = 0;
      const T *x = found.const_data_ptr<T>() + row * H, *y = row_of(stored, step, b);
      for (int64_t j = 0; j < H; ++j) most = std::max(most, mismatch(x[j], y[j]));
      return most;
    };
    if (looks && near(r.output, walked_.output) && (!has_c(cell_) || near(r.cells, walked_.cells))) {
      apart = std::max(apart, furthest(r.output, walked_.output));
      if (has_c(cell_)) apart = std::max(apart, furthest(r.cells, walked_.cells));
      return true;
    }
    const auto put = [&](const Tensor& from, const Tensor& to) {
      if (!to.defined()) return;
      const int64_t width = to.size(2);
      std::copy_n(from.const_data_ptr<T>() + row * width, width, to.mutable_data_ptr<T>() + (step * s_.B + b) * width);
    };
    put(r.output, walked_.output);
    put(r.cells, walked_.cells);
    put(r.gates, walked_.gates);
    return false;
  }

  // The rounds of sequence b.
  void mend(int64_t b, int64_t* statistics) {
    const int64_t K = chunks_.count;
    int64_t redone = 0, round = 1, before = K - 1;  // chunks that changed in the round before
    T apart = 0;
    bool alone = false;
    std::vector<char> changed(K, 1);
    const std::vector<T> zeros(s_.H);
    std::vector<State> begun(K, {zeros, has_c(cell_) ? zeros : std::vector<T>()});  // with what each was walked last
    while (round < K) {
      ++round;
      std::vector<int64_t> chunks;
      std::vector<State> from, ends;
      for (int64_t k = 1; k < K; ++k) {
        if (changed[k - 1]) chunks.push_back(k), from.push_back(end_of(k - 1, b)), ends.push_back(end_of(k, b));
      }
      const std::vector<char> found = again(b, chunks, from, /*looks=*/true, redone, apart);
      std::fill(changed.begin(), changed.end(), 0);
      int64_t all = 0, closer = 0;  // of the last chunk nobody asks
      for (size_t i = 0; i < chunks.size(); ++i) {
        const int64_t k = chunks[i];
        if (found[i] != 0 && k < K - 1) {
          changed[k] = 1;
          ++all;
          closer += 2 * apart_from(end_of(k, b), ends[i]) <= apart_from(from[i], begun[k]);
        }
        begun[k] = from[i];
      }
      if (all == 0) break;
      if (few_meet(round, K, all, closer, before)) {
        alone = true;
        for (int64_t k = round; k < K; ++k) again(b, {k}, {end_of(k - 1, b)}, /*looks=*/false, redone, apart);
        break;
      }
      before = all;
    }
    if (statistics == nullptr) return;
    statistics[0] = round;
    statistics[1] = redone;
    statistics[2] = std::bit_cast<int>(float(apart));
    statistics[3] = alone;
  }

  const Cell cell_;
  const RnnSizes& s_;
  const TimeChunks chunks_;
  const bool save_;
  const Tensor x_, h0_, c0_;
  const WalkRows& walk_;
  std::vector<Tensor> weights_;
  Walked walked_;
};

}  // namespace

int64_t newton_chunks_cpu(const RnnSizes& s) {
  if (s.packed || s.R == 0) return 1;
  if (const auto forced = forced_chunks()) return cut_time(s.T, *forced).count;
  return choose_chunks(s.T, s.B, kRowsAtOnce * at::get_num_threads(), kShortest).count;
}

RnnResults newton_forward_cpu(const RnnArgs& args, const RnnSizes& s, int64_t count, bool keep_cells, bool save,
                              const WalkRows& walk) {
  const auto compute = accumulate_type(args.input.scalar_type());
  const TimeChunks chunks = cut_time(s.T, count);
  const Tensor statistics = newton_statistics(args, s, chunks.count), x = args.input.to(compute);
  const auto padded = [&](const Tensor& t) {
    return at::constant_pad_nd(t, {0, 0, 0, 0, 0, chunks.count * chunks.length - s.T});
  };
  const auto initial = [&](const OptionalTensor& t, int d) {
    return t ? t->narrow(0, d, 1).to(compute) : at::zeros({1, s.B, s.H}, x.options());
  };
  std::vector<Tensor> output, cells, gates, h_n, c_n;
  for (int d = 0; d < s.D; ++d) {
    const bool reverse = d == 1;
    const auto run = [&]<typename T>() {
      return Direction<T>(args, s, d, chunks, save, padded(reverse ? x.flip(0) : x).contiguous(), initial(args.h0, d),
                          has_c(args.cell) ? initial(args.c0, d) : Tensor(), walk)
          .run(statistics.defined() ? statistics.mutable_data_ptr<int64_t>() + 4 * d * s.B : nullptr);
    };
    const Walked found = compute == at::kDouble ? run.template operator()<double>() : run.template operator()<float>();
    const auto put = [&](const Tensor& t, std::vector<Tensor>& all) {
      if (!t.defined()) return;
      const Tensor steps = t.narrow(0, 0, s.T);
      all.push_back(reverse ? steps.flip(0) : steps);
    };
    h_n.push_back(found.output.select(0, s.T - 1));
    if (found.cells.defined()) c_n.push_back(found.cells.select(0, s.T - 1));
    put(found.output, output);
    if (save || keep_cells) put(found.cells, cells);
    put(found.gates, gates);
  }
  const auto none = [&] { return at::empty({0}, x.options()); };
  const auto beside = [&](const std::vector<Tensor>& all) { return all.empty() ? none() : at::cat(all, 2); };
  RnnResults r;
  r.output = beside(output);
  r.cells = beside(cells);
  r.gates = gates.empty() ? none() : at::stack(gates).view({s.D, s.R, 4 * s.H});
  r.h_n = at::stack(h_n);
  r.c_n = c_n.empty() ? none() : at::stack(c_n);
  return r;
}

}  // namespace weft::rnn
