#include "offload/policy/policy.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>

#include "common/integers.h"
#include "offload/policy/model.h"

namespace weft::offload {

int64_t compressed_bytes(int64_t bytes, double density, int64_t itemsize) {
  if (itemsize != 2 && itemsize != 4) return bytes;
  const int64_t n = bytes / itemsize;
  // Rounds ties to even, as Python does.
  const int64_t packed = int64_t(std::nearbyint(double(n) * density)) * itemsize + 4 * ceil_div(n, 32);
  return std::min(packed, bytes);
}

int64_t compressed_elements(int64_t n, double share) {
  return share >= 1 ? n : 32 * int64_t(share * double(n) / 32);
}

namespace {

using namespace policy;

// A set of tensors to move, and its cost. With a budget: the seconds of the step, then the bytes moved, both small.
// Without: the bytes moved, large, and infinite seconds if something does not hide. Where the codec takes time the
// bytes are those sent, which compression reduces: it is meant for what would not hide otherwise.
struct Candidate {
  std::vector<bool> moved;
  double seconds = kNever;
  int64_t bytes = 0;
  // Where the codec takes time: its seconds, and the share of each tensor that is compressed.
  double codec = 0;
  std::vector<double> share;
};

class Search {
 public:
  Search(const Timeline& timeline, Budget budget, const Link& link, bool compress, const std::vector<bool>& movable,
         double slowdown)
      : t_(timeline),
        budget_(budget),
        link_(link),
        in_part_(!budget && compress && std::isfinite(link.codec)),
        model_(timeline, link),
        sets_(timeline, budget) {
    choice_.prefetch.assign(t_.tensors.size(), kStays);
    for (const Saved& s : t_.tensors) choice_.sent.push_back(crossing(s, link, compress && !in_part_ ? 1 : 0));
    plain_seconds_ = model_.run(choice_, std::nullopt).seconds;
    if (in_part_) {
      order_codec(movable);
      if (!codec_orders_.front().empty()) allowed_ = slowdown * plain_seconds_;
    }
    Candidate alone = nothing();
    for (int64_t i = 0; i < model_.tensors(); ++i) {
      if (!movable[i]) continue;
      if (!budget) {  // what does not hide alone does not hide beside others
        alone.moved[i] = true;
        evaluate(alone);
        alone.moved[i] = false;
        if (alone.seconds == kNever) continue;
      }
      movable_.push_back(i);
    }
  }

  std::vector<Move> moves() {
    if (budget_ && sets_.fit()) return {};
    Candidate chosen = nothing();
    if (budget_ && !all_fit()) {
      for (int64_t i : movable_) chosen.moved[i] = true;
    } else if (movable_.size() <= kExhaustive) {
      most_work_ = std::numeric_limits<int64_t>::max();
      chosen = best_of_all();
    } else if (in_part_) {
      // First without compression: the codec is used only for something better.
      const double allowed = std::exchange(allowed_, 0);
      chosen = best_found(chosen);
      allowed_ = allowed;
      most_work_ += kWork;
      if (allowed > 0) chosen = best_found(chosen);
    } else {
      chosen = best_found(chosen);
    }
    return latest(chosen);
  }

 private:
  // 4096 steps of a dozen tensors run in a few milliseconds.
  static constexpr size_t kExhaustive = 12;
  // Operations, copies and tensors that a search may visit, at some 10 ns each.
  static constexpr int64_t kWork = 10'000'000;

  Candidate nothing() const {
    Candidate c;
    c.moved.assign(t_.tensors.size(), false);
    return c;
  }

  bool all_fit() {
    for (int64_t i : movable_) sets_.move(i);
    const bool fit = sets_.fit();
    for (int64_t i : movable_) sets_.keep(i);
    return fit;
  }

  bool better(const Candidate& a, const Candidate& b) const {
    if (budget_) return std::tie(a.seconds, a.bytes) < std::tie(b.seconds, b.bytes);
    if (a.seconds == kNever || b.seconds == kNever) return a.seconds < kNever;
    return std::make_pair(a.bytes, b.codec) > std::make_pair(b.bytes, a.codec);
  }

  // With every copy in as early as possible no operation is later than it must be.
  void evaluate(Candidate& c, double limit = kNever) {
    c.bytes = 0;
    for (int64_t i = 0; i < model_.tensors(); ++i) {
      choice_.prefetch[i] = c.moved[i] ? t_.forward : kStays;
      if (c.moved[i]) c.bytes += t_.tensors[i].bytes;
    }
    if (in_part_) {
      fit(c);
    } else if (budget_) {
      c.seconds = model_.run(choice_, budget_, limit).seconds;
    } else {
      c.seconds = hides() ? plain_seconds_ : kNever;
    }
  }

  // Whether the chosen set fits.
  bool hides() {
    const Model::Result r = model_.run(choice_, std::nullopt, plain_seconds_);
    return r.seconds < kNever && r.out_within_forward && r.forward_stall == 0 && r.backward_stall == 0;
  }

  // The orders in which tensors are compressed: first or last copied out; by bus time saved per second of the codec,
  // and per byte that no longer crosses.
  void order_codec(const std::vector<bool>& movable) {
    std::vector<int64_t> order;
    std::vector<double> won(t_.tensors.size()), fewer = won;
    for (int64_t i = 0; i < model_.tensors(); ++i) {
      const Crossing whole = crossing(t_.tensors[i], link_, 1);
      codec_.push_back(whole.codec);
      if (!movable[i] || whole.lasts == t_.tensors[i].bytes) continue;
      const int64_t bytes = t_.tensors[i].bytes;
      won[i] = double(bytes - whole.lasts) / whole.codec;
      fewer[i] = double(bytes - whole.bytes) / double(bytes - whole.lasts);
      order.push_back(i);
    }
    const auto sorted = [&](auto key) {
      std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return key(a) < key(b); });
      codec_orders_.push_back(order);
    };
    sorted([&](int64_t i) { return -t_.tensors[i].last_forward; });
    sorted([&](int64_t i) { return t_.tensors[i].last_forward; });
    sorted([&](int64_t i) { return -won[i]; });
    sorted([&](int64_t i) { return fewer[i]; });
  }

  // Compresses as much of the moved tensors, in that order, as the codec can in so many seconds.
  void compress(const Candidate& c, const std::vector<int64_t>& order, double seconds) {
    compress_nothing();
    for (int64_t i : order) {
      if (!c.moved[i]) continue;
      share_[i] = std::min(1.0, seconds / codec_[i]);
      choice_.sent[i] = crossing(t_.tensors[i], link_, share_[i]);
      if ((seconds -= codec_[i]) <= 0) break;
    }
  }
  void compress_nothing() {
    share_.assign(t_.tensors.size(), 0);
    for (int64_t i = 0; i < model_.tensors(); ++i) choice_.sent[i] = crossing(t_.tensors[i], link_, 0);
  }

  // Compresses as little of the candidate's tensors as makes it hide.
  void fit(Candidate& c) {
    constexpr int kSteps = 12;  // of a bisection of the codec's seconds
    const auto take = [&] {
      c.bytes = 0, c.codec = 0;
      for (int64_t i = 0; i < model_.tensors(); ++i) {
        if (!c.moved[i]) continue;
        c.bytes += choice_.sent[i].bytes;
        c.codec += choice_.sent[i].codec;
      }
      c.share = share_;
      c.seconds = plain_seconds_;
    };
    compress_nothing();
    c.seconds = kNever;
    if (hides()) return take();
    if (allowed_ <= 0 || model_.work() + work_ >= most_work_) return;
    Candidate best = c;
    for (const auto& order : codec_orders_) {
      compress(c, order, allowed_);
      if (!hides()) continue;
      double low = 0, high = allowed_;
      for (int step = 0; step < kSteps; ++step) {
        const double middle = (low + high) / 2;
        compress(c, order, middle);
        (hides() ? high : low) = middle;
      }
      compress(c, order, high);
      take();
      if (better(c, best)) best = c;
    }
    c = best;
  }

  Candidate best_of_all() {
    Candidate best = nothing(), c = best;
    for (uint32_t subset = 0; subset < 1u << movable_.size(); ++subset) {
      for (size_t j = 0; j < movable_.size(); ++j) {
        const int64_t i = movable_[j];
        const bool moved = subset >> j & 1;
        if (moved != c.moved[i]) moved ? sets_.move(i) : sets_.keep(i);
        c.moved[i] = moved;
      }
      if (!sets_.fit() || (in_part_ && bytes_of(c) < best.bytes)) continue;
      evaluate(c, best.seconds);
      if (better(c, best)) best = c;
    }
    return best;
  }

  // The movable tensors by a score, highest first; ties: larger, then lower index.
  template <typename Score>
  std::vector<int64_t> by(Score score) const {
    std::vector<double> scores(t_.tensors.size());
    for (int64_t i : movable_) scores[i] = score(i);
    std::vector<int64_t> order = movable_;
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      return std::make_pair(scores[a], t_.tensors[a].bytes) > std::make_pair(scores[b], t_.tensors[b].bytes);
    });
    return order;
  }

  int64_t bytes_of(const Candidate& c) const {
    int64_t bytes = 0;
    for (int64_t i = 0; i < model_.tensors(); ++i)
      if (c.moved[i]) bytes += t_.tensors[i].bytes;
    return bytes;
  }

  // Adds tensors in that order: with a budget those that help, until the set fits; without, all that still hide.
  void add(Candidate& c, const std::vector<int64_t>& order) {
    if (in_part_) evaluate(c);
    for (int64_t i : order) {
      if (c.moved[i]) continue;
      if (budget_) {
        if (sets_.fit()) break;
        if (!sets_.helped_by(i)) continue;
        c.moved[i] = true;
        sets_.move(i);
      } else if (in_part_) {
        Candidate more = c;
        more.moved[i] = true;
        evaluate(more);
        if (better(more, c)) c = std::move(more);
      } else {
        c.moved[i] = true;
        evaluate(c);
        if (c.seconds == kNever) c.moved[i] = false;
      }
    }
  }

  // Takes out what need not move, from the end of the order.
  void prune(Candidate& c, const std::vector<int64_t>& order) {
    for (size_t j = order.size(); j-- > 0;) {
      const int64_t i = order[j];
      if (!c.moved[i] || !sets_.fit_with(i)) continue;
      c.moved[i] = false;
      sets_.keep(i);
    }
  }

  // Makes the working sets those of `c`.
  void enter(const Candidate& c) {
    for (int64_t i : movable_) {
      if (c.moved[i] == entered_[i]) continue;
      c.moved[i] ? sets_.move(i) : sets_.keep(i);
    }
    entered_ = c.moved;
  }
  void complete(Candidate& c, const std::vector<int64_t>& order, bool least = true) {
    if (budget_) enter(c);
    add(c, order);
    if (budget_ && least) prune(c, order);
    entered_ = c.moved;
    evaluate(c);
    work_ += 8 * int64_t(order.size());
  }

  Candidate best_found(Candidate best) {
    // Seconds between the last use in the forward and the first in the backward, without copies.
    std::vector<double> start(t_.seconds.size() + 1);
    std::partial_sum(t_.seconds.begin(), t_.seconds.end(), start.begin() + 1);
    const auto distance = [&](int64_t i) {
      return start[t_.tensors[i].first_backward] - start[t_.tensors[i].last_forward + 1];
    };
    const auto ratio = [&](int64_t i) {
      return double(t_.tensors[i].bytes) / double(std::max<int64_t>(choice_.sent[i].bytes, 1));
    };
    const std::vector<int64_t> orders[] = {
        by(distance),
        by([&](int64_t i) { return distance(i) * ratio(i); }),
        by([&](int64_t i) { return double(t_.tensors[i].bytes) * distance(i); }),
        by(ratio),
        by([&](int64_t i) { return double(t_.tensors[i].bytes); }),
    };
    entered_.assign(t_.tensors.size(), false);
    const auto consider = [&](const Candidate& c) {
      if (better(c, best)) best = c;
    };
    for (const auto& order : orders) {
      Candidate c = nothing();
      complete(c, order);
      consider(c);
    }
    if (budget_) {
      Candidate all = nothing();
      for (int64_t i : movable_) all.moved[i] = true;
      evaluate(all);
      consider(all);
    }

    // Exchanges a few tensors, completes the set again, and keeps what is better.
    uint64_t random = 0x9e3779b97f4a7c15;
    const auto draw = [&](uint64_t below) {
      random ^= random << 13, random ^= random >> 7, random ^= random << 17;
      return random % below;
    };
    while (model_.work() + work_ < most_work_ && !perfect(best)) {
      Candidate c = best;
      const uint64_t changes = 1 + draw(4);
      std::vector<int64_t> order = orders[draw(std::size(orders))];
      for (uint64_t change = 0; change < changes; ++change) {
        const uint64_t at = draw(order.size());
        const int64_t i = order[at];
        const auto from = order.begin() + int64_t(at);
        // When the set is completed, tensors taken out come last and tensors put in first.
        if (c.moved[i]) {
          c.moved[i] = false;
          std::rotate(from, from + 1, order.end());
        } else {
          c.moved[i] = budget_.has_value();
          std::rotate(order.begin(), from, from + 1);
        }
      }
      complete(c, order, draw(2) == 0);
      consider(c);
    }
    return best;
  }

  // Whether no other set can be better.
  bool perfect(const Candidate& c) const {
    if (budget_) return c.seconds == plain_seconds_;
    return c.codec == 0 && std::all_of(movable_.begin(), movable_.end(), [&](int64_t i) { return c.moved[i]; });
  }

  // The set with each copy in as late as possible without a longer step, settled from the last to the first: a later
  // copy in makes nothing earlier, so what is settled stays the latest.
  std::vector<Move> latest(const Candidate& c) {
    std::vector<int64_t> order;
    for (int64_t i : model_.by_in()) {
      choice_.prefetch[i] = c.moved[i] ? t_.forward : kStays;
      if (in_part_) choice_.sent[i] = crossing(t_.tensors[i], link_, c.share.empty() ? 0 : c.share[i]);
      if (c.moved[i]) order.push_back(i);
    }
    const double seconds = model_.run(choice_, budget_).seconds;
    int64_t most = model_.operations();
    for (size_t j = order.size(); j-- > 0;) {
      const int64_t i = order[j];
      const auto holds = [&](int64_t prefetch) {
        choice_.prefetch[i] = prefetch;
        return model_.run(choice_, budget_, seconds).seconds <= seconds;
      };
      int64_t low = t_.forward, high = std::min(most, t_.tensors[i].first_backward);
      if (holds(high)) {
        low = high;
      } else {
        for (--high; low < high;) {
          const int64_t middle = high - (high - low) / 2;
          if (holds(middle)) {
            low = middle;
          } else {
            high = middle - 1;
          }
        }
      }
      choice_.prefetch[i] = most = low;
    }
    std::vector<Move> moves;
    for (int64_t i : order) {
      const bool compressed = choice_.sent[i].bytes < t_.tensors[i].bytes;
      moves.push_back({i, choice_.prefetch[i], compressed, in_part_ && compressed ? c.share[i] : 1});
    }
    return moves;
  }

  const Timeline& t_;
  const Budget budget_;
  const Link link_;
  const bool in_part_;  // tensors may be compressed in part: where nothing may wait, and the codec takes time
  Model model_;
  WorkingSets sets_;
  Choice choice_;
  double allowed_ = 0;                 // seconds of the codec
  std::vector<double> share_, codec_;  // chosen; seconds of the codec for the whole tensor
  std::vector<std::vector<int64_t>> codec_orders_;
  std::vector<int64_t> movable_;
  std::vector<bool> entered_;  // the set whose working sets `sets_` has
  double plain_seconds_ = 0;
  int64_t work_ = 0;  // work beside the model's
  int64_t most_work_ = kWork;
};

// AutoVM's rule for unknown run times: tensors with the largest reuse distance move until all working sets fit, and
// come back as early as these allow.
std::vector<Move> plan_by_order(const Timeline& t, Budget budget, bool compress, const std::vector<bool>& movable) {
  std::vector<Move> moves;
  if (!budget) return moves;
  WorkingSets sets(t, budget);
  std::vector<int64_t> order;
  for (int64_t i = 0; i < int64_t(t.tensors.size()); ++i)
    if (movable[i]) order.push_back(i);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    const Saved &x = t.tensors[a], &y = t.tensors[b];
    return std::make_pair(x.first_backward - x.last_forward, x.bytes) >
           std::make_pair(y.first_backward - y.last_forward, y.bytes);
  });
  for (int64_t i : order) {
    if (sets.fit()) break;
    sets.move(i);
    const Saved& s = t.tensors[i];
    moves.push_back({i, s.first_backward, compress && compressed_bytes(s.bytes, s.density, s.itemsize) < s.bytes});
  }
  std::sort(moves.begin(), moves.end(), [&](const Move& a, const Move& b) {
    return std::make_pair(t.tensors[a.tensor].first_backward, a.tensor) <
           std::make_pair(t.tensors[b.tensor].first_backward, b.tensor);
  });
  int64_t least = t.forward;
  for (Move& move : moves) {
    const int64_t latest = move.prefetch;
    while (move.prefetch > least && sets.fits(move.prefetch - 1, t.tensors[move.tensor].bytes)) --move.prefetch;
    sets.keep(move.tensor, latest);
    sets.move(move.tensor, move.prefetch);
    least = move.prefetch;
  }
  return moves;
}

}  // namespace

Prediction simulate(const Timeline& t, const std::vector<Move>& moves, Budget budget, const Link& link) {
  Prediction p{};
  Choice choice{std::vector<int64_t>(t.tensors.size(), kStays), std::vector<Crossing>(t.tensors.size())};
  for (const Move& move : moves) {
    const Saved& s = t.tensors[move.tensor];
    choice.prefetch[move.tensor] = move.prefetch;
    const Crossing& sent = choice.sent[move.tensor] = crossing(s, link, move.compressed ? move.share : 0);
    p.moved_bytes += s.bytes;
    p.sent_bytes += sent.bytes;
    p.codec_seconds += sent.codec;
  }
  if (!t.known) {
    WorkingSets sets(t, budget);
    for (const Move& move : moves) sets.move(move.tensor, move.prefetch);
    p.peak_bytes = sets.peak();
    return p;
  }
  const Model::Result r = Model(t, link).run(choice, budget);
  p.peak_bytes = r.peak_bytes;
  p.seconds = r.seconds;
  p.forward_stall = r.forward_stall;
  p.backward_stall = r.backward_stall;
  return p;
}

std::vector<Move> plan(const Timeline& t, Budget budget, const Link& link, bool compress,
                       const std::vector<bool>& movable, double slowdown) {
  if (!t.known) return plan_by_order(t, budget, compress, movable);
  return Search(t, budget, link, compress, movable, slowdown).moves();
}

}  // namespace weft::offload
