// Points in time, on a device's stream or on the host's clock.
#pragma once
#include <algorithm>
#include <memory>
#include <utility>

namespace weft::offload {

class Event;
using EventPtr = std::shared_ptr<const Event>;

// A point of a device's stream or of the host's clock; or a pair of them, which completes when both have completed.
class Event {
 public:
  struct Pair {
    EventPtr a, b;
  };
  virtual ~Event() = default;
  virtual bool completed() const = 0;
  // Identifies the stream. Events of one stream complete in creation order.
  virtual const void* stream() const { return nullptr; }
  // Null for a single event.
  virtual const Pair* pair() const { return nullptr; }
  // Seconds from `earlier` to this event. Both have completed, and belong to the same mover and device.
  double since(const Event& earlier) const {
    if (const Pair* own = pair()) return std::max(own->a->since(earlier), own->b->since(earlier));
    if (const Pair* its = earlier.pair()) return std::min(since(*its->a), since(*its->b));
    return elapsed(earlier);
  }

 protected:
  // `since` between single events.
  virtual double elapsed(const Event& earlier) const = 0;
};

// The later of two events. A stream that waits needs no event recorded behind the wait: it continues at the later of
// its event before the wait and the event that it waited for.
class EventPair : public Event {
 public:
  EventPair(EventPtr a, EventPtr b) : pair_{std::move(a), std::move(b)} {}
  bool completed() const override { return pair_.a->completed() && pair_.b->completed(); }
  const Pair* pair() const override { return &pair_; }

 private:
  double elapsed(const Event&) const override { return 0; }  // never called: `since` resolves pairs

  const Pair pair_;
};

// Now, by the host's clock.
EventPtr host_event();

}  // namespace weft::offload
