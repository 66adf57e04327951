// The model of policy.h, which the search runs many times: a step under a choice of moves, and its working sets.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "offload/policy/policy.h"

namespace weft::offload::policy {

constexpr int64_t kStays = -1;
constexpr double kNever = std::numeric_limits<double>::infinity();

// A tensor on the bus, one way.
struct Crossing {
  int64_t bytes, lasts;  // lasts: uncompressed bytes that would take as long
  double codec;          // seconds of the codec, both ways
};

inline Crossing crossing(const Saved& s, const Link& link, double share) {
  const int64_t part = share >= 1 || (s.itemsize != 2 && s.itemsize != 4)
                           ? s.bytes
                           : compressed_elements(s.bytes / s.itemsize, share) * s.itemsize;
  const int64_t packed = share > 0 ? compressed_bytes(part, s.density, s.itemsize) : part;
  if (packed == part) return {s.bytes, s.bytes, 0};
  const int64_t rest = s.bytes - part;
  return {packed + rest, std::max(packed, int64_t(std::ceil(link.least * double(part)))) + rest,
          2 * double(part + packed) / link.codec};
}

// A choice of moves: prefetch[i] is kStays or the operation from which tensor i may come back.
struct Choice {
  std::vector<int64_t> prefetch;
  std::vector<Crossing> sent;
};

// The model, for one timeline and one link.
class Model {
 public:
  Model(const Timeline& timeline, const Link& link)
      : t_(timeline),
        link_(link),
        operations_(int64_t(timeline.seconds.size())),
        new_bytes_(operations_),
        old_bytes_(operations_),
        by_out_(timeline.tensors.size()),
        waiting_(operations_),
        out_done_(timeline.tensors.size()) {
    for (const Saved& s : t_.tensors) {
      new_bytes_[s.last_forward] += s.bytes;
      old_bytes_[s.last_backward] += s.bytes;
    }
    std::iota(by_out_.begin(), by_out_.end(), 0);
    by_in_ = by_out_;
    std::stable_sort(by_out_.begin(), by_out_.end(),
                     [&](int64_t a, int64_t b) { return t_.tensors[a].last_forward < t_.tensors[b].last_forward; });
    std::stable_sort(by_in_.begin(), by_in_.end(),
                     [&](int64_t a, int64_t b) { return t_.tensors[a].first_backward < t_.tensors[b].first_backward; });
  }

  const std::vector<int64_t>& by_in() const { return by_in_; }
  int64_t tensors() const { return int64_t(t_.tensors.size()); }
  int64_t operations() const { return operations_; }

  struct Result {
    int64_t peak_bytes = 0;
    double seconds = 0, forward_stall = 0, backward_stall = 0;
    bool out_within_forward = true;
  };

  // Runs the step; gives up, with infinite `seconds`, once it takes longer than `limit`.
  Result run(const Choice& choice, Budget budget, double limit = kNever) {
    out_.clear(), in_.clear();
    std::fill(waiting_.begin(), waiting_.end(), 0);
    std::fill(out_done_.begin(), out_done_.end(), false);
    for (int64_t i : by_out_)
      if (choice.prefetch[i] != kStays) out_.push_back(i);
    for (int64_t i : by_in_) {
      if (choice.prefetch[i] == kStays) continue;
      in_.push_back(i);
      ++waiting_[t_.tensors[i].first_backward];
    }
    work_ += operations_ + 2 * int64_t(in_.size());

    Result result;
    int64_t count = 0, next = 0;  // next: the operation that runs, or else that starts next
    size_t out = 0, in = 0;       // likewise for the copies
    double now = 0, op_end = kNever, out_end = kNever, in_end = kNever, last_end = 0;
    const auto room = [&](int64_t bytes) { return !budget || count + bytes <= *budget; };
    const auto start_operation = [&] {
      (next < t_.forward ? result.forward_stall : result.backward_stall) += now - last_end;
      count += new_bytes_[next];
      op_end = now + t_.seconds[next];
    };
    const auto start_in = [&] {
      const int64_t i = in_[in];
      count += t_.tensors[i].bytes;
      in_end = now + double(choice.sent[i].lasts) / link_.h2d;
    };
    while (next < operations_) {
      if (op_end <= now) {
        count -= old_bytes_[next++];
        last_end = now;
        op_end = kNever;
      }
      if (out_end <= now) {
        const int64_t i = out_[out++];
        count -= t_.tensors[i].bytes;
        out_done_[i] = true;
        result.out_within_forward &= next < t_.forward || (next == t_.forward && now <= last_end);
        out_end = kNever;
      }
      if (in_end <= now) {
        --waiting_[t_.tensors[in_[in++]].first_backward];
        in_end = kNever;
      }
      if (next == operations_) break;

      const bool runs = op_end != kNever, back = waiting_[next] == 0;
      if (!runs && back && (new_bytes_[next] == 0 || room(new_bytes_[next]))) start_operation();
      const int64_t ended = next;  // operations before this one
      if (out_end == kNever && out < out_.size() && t_.tensors[out_[out]].last_forward < ended)
        out_end = now + double(choice.sent[out_[out]].lasts) / link_.d2h;
      if (in_end == kNever && in < in_.size()) {
        const int64_t i = in_[in];
        if (choice.prefetch[i] <= ended && out_done_[i] && room(t_.tensors[i].bytes)) start_in();
      }
      double then = std::min({op_end, out_end, in_end});
      if (then == kNever) {
        back ? start_operation() : start_in();
        then = std::min(op_end, in_end);
      }
      result.peak_bytes = std::max(result.peak_bytes, count);
      now = then;
      if (now > limit) {
        result.seconds = kNever;
        return result;
      }
    }
    result.seconds = last_end;
    return result;
  }

  // Operations and copies that all runs have simulated.
  int64_t work() const { return work_; }

 private:
  const Timeline& t_;
  const Link link_;
  const int64_t operations_;
  std::vector<int64_t> new_bytes_, old_bytes_, by_out_, by_in_;
  int64_t work_ = 0;
  // Buffers of one run, kept for reuse.
  std::vector<int64_t> out_, in_, waiting_;
  std::vector<bool> out_done_;
};

// A row of numbers; adds to a range and finds the maximum of a range in logarithmic time.
class RangeMax {
 public:
  explicit RangeMax(int64_t size) : size_(size), most_(4 * size_t(size)), added_(4 * size_t(size)) {}
  void add(int64_t begin, int64_t end, int64_t value) {
    if (begin < end) add(1, 0, size_, begin, end, value);
  }
  int64_t most(int64_t begin, int64_t end) const { return begin < end ? most(1, 0, size_, begin, end) : kNone; }

 private:
  static constexpr int64_t kNone = std::numeric_limits<int64_t>::min();

  void add(size_t node, int64_t low, int64_t high, int64_t begin, int64_t end, int64_t value) {
    if (end <= low || high <= begin) return;
    if (begin <= low && high <= end) {
      most_[node] += value;
      added_[node] += value;
      return;
    }
    const int64_t middle = (low + high) / 2;
    add(2 * node, low, middle, begin, end, value);
    add(2 * node + 1, middle, high, begin, end, value);
    most_[node] = std::max(most_[2 * node], most_[2 * node + 1]) + added_[node];
  }
  int64_t most(size_t node, int64_t low, int64_t high, int64_t begin, int64_t end) const {
    if (begin <= low && high <= end) return most_[node];
    const int64_t middle = (low + high) / 2;
    int64_t found = kNone;
    if (begin < middle) found = most(2 * node, low, middle, begin, end);
    if (end > middle) found = std::max(found, most(2 * node + 1, middle, high, begin, end));
    return found + added_[node];
  }

  int64_t size_;
  std::vector<int64_t> most_, added_;
};

// Bytes that count at each operation with every copy in as late as possible, or at the given prefetch.
class WorkingSets {
 public:
  WorkingSets(const Timeline& timeline, Budget budget)
      : t_(timeline), operations_(int64_t(timeline.seconds.size())), budget_(budget), sets_(operations_) {
    for (const Saved& s : t_.tensors) sets_.add(s.last_forward, s.last_backward + 1, s.bytes);
  }

  void move(int64_t i) { move(i, t_.tensors[i].first_backward); }
  void keep(int64_t i) { keep(i, t_.tensors[i].first_backward); }
  void move(int64_t i, int64_t prefetch) { sets_.add(t_.tensors[i].last_forward + 1, prefetch, -t_.tensors[i].bytes); }
  void keep(int64_t i, int64_t prefetch) { sets_.add(t_.tensors[i].last_forward + 1, prefetch, t_.tensors[i].bytes); }

  int64_t peak() const { return operations_ == 0 ? 0 : sets_.most(0, operations_); }
  bool fit() const { return !above(0, operations_, 0); }
  // Whether operation k's working set has room for so many more bytes.
  bool fits(int64_t k, int64_t more) const { return !above(k, k + 1, more); }
  // Whether moving tensor i shrinks a working set that is above the budget.
  bool helped_by(int64_t i) const { return above(t_.tensors[i].last_forward + 1, t_.tensors[i].first_backward, 0); }
  // Whether the working sets still fit if moved tensor i is kept.
  bool fit_with(int64_t i) const {
    const Saved& s = t_.tensors[i];
    return !above(s.last_forward + 1, s.first_backward, s.bytes);
  }

 private:
  bool above(int64_t begin, int64_t end, int64_t more) const {
    return budget_ && begin < end && sets_.most(begin, end) > *budget_ - more;
  }

  const Timeline& t_;
  const int64_t operations_;
  const Budget budget_;
  RangeMax sets_;
};

}  // namespace weft::offload::policy
