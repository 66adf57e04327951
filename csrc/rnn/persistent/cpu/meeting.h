// Where the threads of a team wait for each other. No torch header.
//
// On a machine that others use too a thread may lose its processor at any moment, for milliseconds, which is longer
// than many a pass, and gets it back when others have had their turn. Who waits meanwhile sleeps after a short spin,
// and has to wait for a processor in its turn. So members that meet at each step go on as fewer members, down to one,
// who run the parts of those that left. What the parts are does not depend on who runs them: results are the same, bit
// for bit.
#pragma once
#include <cstdint>

namespace weft::rnn {

// [begin, end) of the i-th of n nearly equal parts of count.
struct Range {
  int64_t begin, end;
};
inline __attribute__((always_inline)) Range split(int64_t count, int64_t n, int64_t i) {
  return {count * i / n, count * (i + 1) / n};
}

// How often a member has arrived: it alone writes, on a cache line of its own.
struct alignas(64) Arrivals {
  int count = 0;
};

// Threads that run at the same time meet here. Deadlock-free as long as every member is a thread of its own: a waiting
// one sleeps after a short spin.
struct Barrier {
  Arrivals* members;
  int size;
  void wait(int member) const;
};

// The wish to go on as fewer members: how many times they should halve, and the meeting of the last wish.
struct alignas(64) Wish {
  int64_t value = 0;
};

// Members of a crew that should begin a pass over `parts`: fewer of them for a tenth of a second after members came
// late.
int crew_members(int parts);

// The members that run the parts of a batch group, as one of them sees it.
class Crew {
 public:
  // `arrivals` of each member, untouched by other crews, and the crew's `wish`; the first `members` of them work.
  Crew(Arrivals* arrivals, Wish* wish, int parts, int members, int member);

  // The parts that this member runs now.
  Range mine() const { return mine_; }

  // False once it has left.
  bool present() const { return mine_.begin < mine_.end; }

  // Every member has run its parts when this returns; from here on mine() may be another range.
  void meet() {
    if (members_ > 1) meet_others();
  }

 private:
  void meet_others();
  void wish_for_fewer(int meeting);
  void divide();

  Arrivals* arrivals_;
  Wish* wish_;
  int parts_, members_, member_;
  int meetings_ = 0, halvings_ = 0;
  int64_t begin_ = 0;  // of the pass, in nanoseconds
  Range mine_;
};

}  // namespace weft::rnn
