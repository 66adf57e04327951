// The tracker of an offload object: what is saved for backward, which saved tensors are the same memory, what counts
// against the budget, what moves and when it comes back. Autograd calls it for every tensor that it saves (the pack
// hook) and reads (the unpack hook).
//
// Ownership. A graph owns a Packed for each saved tensor. Packeds own a Block, which is memory: a connected range of
// bytes of one storage, at one version of one version counter. A Block owns the source while it is kept, and transfers
// once it has moved. The Use (one `with` block and its backwards) and the Engine (the offload object) own no tensors:
// when a graph goes, its memory goes.
//
// Identity. Two tensors are the same memory where storage, version counter and version are equal and their bytes
// overlap; a later tensor can extend a block or connect two. Storages are compared by address, while a weak reference
// keeps the address from being reused. Siblings of unsafe_chunk share a storage but have version counters of their own,
// so they are separate blocks; bytes that several blocks share count for the first. If resize_ has given a block's
// storage memory at another address, the block takes no part in later saves, and a read returns what the storage holds,
// as torch does, while the storage is alive.
//
// Counting, in the order of the compute stream. A block counts from its save until the graph drops it; a moved one
// until its copy out has ended, which the host has seen or the stream of the save waits for. Only then is the source
// dropped: torch's allocator gives its memory to later work of that stream, which is then behind the copy. A restored
// block counts while anyone holds the restored memory. This bounds memory: before the next save's bytes are allocated,
// the compute stream waits for the oldest copies out until they fit. The host never waits; a wait for a copy that has
// ended is free.
//
// Host cost. A moved tensor takes four events (save, end of the copy out, read, end of the copy back), four waits and
// one query; a kept one takes none. Small tensors that a plan moves uncompressed take them together, up to kMostJoint
// of them: they leave when the last of them has been saved, or the room is needed, and come back when the first of them
// is due and there is room. How long a stream waited follows from the event that it was at and the one that it waited
// for; none is recorded behind a wait. Nothing is queried where a wait does as well, and otherwise at most every tenth
// of a millisecond. Whether the stream is captured is asked for what may move, once per save or read.
//
// All of this runs under Python's lock.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/SafePyObject.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/python_headers.h>

#include <array>
#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "offload/tracker/recycled.h"
#include "offload/transfer/mover.h"

namespace weft::offload {

struct Range {
  int64_t lo, hi;
  int64_t size() const { return hi - lo; }
  bool operator==(const Range&) const = default;
  bool overlaps(const Range& r) const { return lo < r.hi && r.lo < hi; }
  bool contains(const Range& r) const { return lo <= r.lo && r.hi <= hi; }
};

using Ranges = c10::SmallVector<Range, 1>;

enum Reason : uint8_t { kSmall, kLast, kPool, kHost, kBudget, kOther, kReasons };
constexpr std::array<const char*, kReasons> kReasonNames = {"small", "last", "pool", "host", "budget", "other"};

// Tensors that share the events of a copy: so many, of so many bytes together, which the bus takes longer for than the
// host.
constexpr size_t kMostJoint = 16;
constexpr int64_t kJointBytes = 4 << 20;

struct Settings {
  std::optional<int64_t> budget;
  Codec codec;
  int64_t min_bytes, keep_last;
};

// A plan's decision for a saved tensor, and what it expects of it.
struct Expected {
  int64_t bytes, itemsize;
  bool moves;
  double share;  // compressed share of its bytes
  double density;
};
// The plan for one device.
struct TransferPlan {
  std::vector<Expected> tensors;                  // in the order of their saves
  std::vector<std::pair<int64_t, int64_t>> back;  // (tensor, operation from which it may come back), in order
  int64_t room;                                   // most bytes that may be counted at once
  // Where positive: after so many tensors, when nothing that moves is saved any more, hooks may go. Then those behind
  // are what is read first, in so many operations, before anything comes back.
  int64_t hooked = 0, unhooked_reads = 0, unhooked_bytes = 0;
};

// A block in the statistics; outlives it.
struct Record {
  int64_t number, first_bytes, itemsize;
  int64_t bytes = 0, tensors = 0;  // bytes of no earlier block; distinct ranges
  Reason reason;
  bool moved = false, compressed = false, in_timeline = false;
  bool uncounted = false;                   // a parameter: outside of the budget, 0 bytes for the planner
  int64_t first_read = -1, last_read = -1;  // operations
  int64_t saved_again = 0;                  // after so many tensors of the timeline, the last time
  std::vector<Count> counts;                // of non-zero elements
};

struct Totals {
  int64_t saved_bytes = 0, saved_tensors = 0, moved_bytes = 0, moved_tensors = 0;
  int64_t sent_bytes = 0, returned_bytes = 0;  // in addition to the spans
  int64_t compressed_tensors = 0;
  int64_t unhooked_tensors = 0;  // that were saved without hooks, by the plan: part of those that are kept
  std::array<int64_t, kReasons> kept{};
};

struct Stall {
  int64_t operation;
  bool forward;
  std::string name;
  EventPtr begin, end;
};

// One copy on the bus.
struct Span {
  bool out;
  Sent sent;
  EventPtr begin, end;
};

class Engine;
class Use;
class Tracker;
struct Residency;

// The version of a tensor when it was saved; raises torch's own error if it has changed.
class VersionCheck {
 public:
  explicit VersionCheck(const at::Tensor& x);
  bool same(const VersionCheck& other) const;
  const c10::VariableVersion& counter() const { return counter_; }
  bool changed() const { return counter_.enabled() && counter_.current_version() != version_; }
  [[noreturn]] void raise_error(const std::string& type, const std::string& sizes) const;

 private:
  c10::VariableVersion counter_;
  uint32_t version_, output_nr_;
  c10::weak_intrusive_ptr<c10::TensorImpl> original_;  // does not keep its memory
  const torch::autograd::Node* producer_;              // only ever compared
  bool view_;
};

// A copy out in progress: keeps the source alive and counted until it has ended.
struct Outgoing {
  c10::Storage source;
  std::vector<std::shared_ptr<Transfer>> transfers;
  int64_t bytes;
};

struct Block : std::enable_shared_from_this<Block> {
  Block(std::shared_ptr<Use> use, Tracker& tracker, const VersionCheck& version, c10::Stream stream)
      : use(std::move(use)), tracker(tracker), version(version), streams{stream} {}
  ~Block();

  std::shared_ptr<Use> use;
  Tracker& tracker;
  VersionCheck version;
  std::shared_ptr<Block> into;  // the block that absorbed this one
  c10::StorageImpl* key = nullptr;
  c10::Storage source;  // while kept
  std::weak_ptr<Outgoing> outgoing;
  at::ScalarType dtype;
  uintptr_t address = 0;  // of the storage's byte 0
  Range hull{0, 0};
  Ranges seen;                                       // distinct tensors
  Ranges runs;                                       // disjoint bytes
  std::vector<std::shared_ptr<Transfer>> transfers;  // one per run, once moved
  bool moved = false, eligible = false, read = false;
  int64_t bytes = 0, unread = 0;
  std::shared_ptr<Record> record;
  // The bytes are complete at `saved`, or, where it is null, when `streams` have done the work that they have when the
  // bytes move.
  c10::SmallVector<c10::Stream, 1> streams;
  EventPtr saved;
  int64_t staging = 0;  // device memory that the codec needs to bring it back
  // The restored memory: the hull at that time, shifted by an offset; `held` until every reader has read it once.
  c10::weak_intrusive_ptr<c10::StorageImpl> restored{c10::intrusive_ptr<c10::StorageImpl>()};
  c10::Storage held;
  Range restored_hull{0, 0};
  int64_t restored_offset = 0;
  bool arriving = false;  // no stream has waited for the copy back yet
  int64_t ahead = 0;      // bytes of it that came back before its first read

  void drop_held();

  // Whether resize_ has given the storage other memory since. No version counts that: FSDP2 frees and gathers
  // parameters so.
  bool resized(const c10::StorageImpl& storage) const {
    return reinterpret_cast<uintptr_t>(storage.data()) != address || int64_t(storage.nbytes()) < hull.hi;
  }
};

// The block that it is part of now.
inline std::shared_ptr<Block> root(std::shared_ptr<Block> block) {
  while (block->into) block = block->into;
  return block;
}

// What a graph holds for one saved tensor.
struct Packed {
  explicit Packed(const at::Tensor& x) : version(x) {}
  Packed(const Packed&) = delete;
  Packed& operator=(const Packed&) = delete;
  ~Packed();
  static void* operator new(size_t) { return Recycled<Packed>().allocate(1); }
  static void operator delete(void* data) { Recycled<Packed>().deallocate(static_cast<Packed*>(data), 1); }

  VersionCheck version;
  at::Tensor tensor;                                   // only of a tensor that never moves
  c10::SmallVector<std::shared_ptr<Block>, 1> blocks;  // its block; of a tensor that never moves, for the statistics
  Range range{0, 0};
  c10::DispatchKeySet keys;
  caffe2::TypeMeta dtype;
  c10::DimVector sizes, strides;
  bool read = false;
};

// The bytes of saved tensors that are on one device, of all uses of an object.
struct Residency {
  Residency(c10::Device device, bool budgeted) : device(device), budgeted(budgeted) {}
  const c10::Device device;
  const bool budgeted;                           // false: host memory, which has no budget
  int64_t counted = 0, wanted = 0, leaving = 0;  // leaving: the part of counted on its way out
  int64_t staging = 0;                           // the codec's part of counted
  std::deque<std::shared_ptr<Outgoing>> outs;
  std::vector<std::pair<c10::weak_intrusive_ptr<c10::StorageImpl>, int64_t>> restored;
  std::vector<Tracker*> open;
  std::chrono::steady_clock::time_point polled{};

  void count(int64_t bytes);
  void want(int64_t bytes);
  void pop();        // the oldest copy out has ended
  bool due() const;  // whether a while has passed since the last poll
  void poll();       // no longer counts ended copies out and dropped restored memory
  void sweep();      // the latter alone, without asking the device
};

// One use on one device: its timeline, its statistics, and its moves.
class Tracker {
 public:
  Tracker(Engine& engine, Use& use, Residency& residency, std::shared_ptr<const TransferPlan> plan);
  ~Tracker();

  // Updates residency; called for every save and read. What is `read` counts nothing new: what comes back sweeps.
  void look(bool read = false);
  // Whether a new block will stay whatever the stream is: without a budget, where the plan does not move it.
  bool stays() const;
  // Whether the current stream is captured; asked once after each look.
  bool capturing();
  std::shared_ptr<Block> save(const at::Tensor& x, Range range, const VersionCheck& version, bool may_move,
                              bool uncounted = false);
  c10::Storage read(Block& block, Packed& packed, int64_t* offset);
  void read_kept(Block& block, Packed& packed);  // of a tensor that never moves
  void parameter(const at::Tensor& x, Range range);
  bool is_parameter(const at::Tensor& x, Range range) const;
  void exit();
  void finish();
  void give_back();  // frees the codec's memory if no open use may need it
  void end();        // ends the last operation

  Engine& engine;
  Use& use;
  Residency& residency;
  Totals totals;
  int64_t peak = 0, peak_without = 0;
  // Of the timeline. `forward`: number of operations in the forward, 0 until it ends.
  int64_t saves = 0, reads = 0, forward = 0;
  int64_t numbers = 0;
  std::vector<std::shared_ptr<Record>> timeline;
  std::deque<std::shared_ptr<Record>> latest;  // the last `keep_last` saved
  std::vector<EventPtr> events;
  std::vector<int64_t> curve;  // bytes counted at each event
  std::vector<Stall> stalls;
  std::vector<Span> spans;
  bool ended = false;

  int64_t operation() const { return forward == 0 ? saves : forward + reads - 1; }
  void stall(EventPtr begin, EventPtr end, const std::string& name);
  void span(bool out, const Transfer& transfer);
  void span_joint(bool out, const std::vector<std::vector<std::shared_ptr<Transfer>>>& transfers);
  bool planned() const { return plan_ != nullptr; }
  // Whether what is saved from now on needs no hooks; `unhook` counts it as planned.
  bool done_moving() const {
    return plan_ != nullptr && forward == 0 && unhooked_ == nullptr && saves == plan_->hooked;
  }
  void unhook();
  void forget(Block& block);

 private:
  struct Entry {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    c10::SmallVector<Block*, 1> blocks;
    Ranges parameters;
  };
  // A small block that is going to move.
  struct Postponed {
    std::weak_ptr<Block> block;
    double density;
  };
  std::shared_ptr<Block> create(const at::Tensor& x, Range range, const VersionCheck& version, Entry& entry,
                                Reason reason, bool uncounted);
  void admit(const std::shared_ptr<Block>& block, int64_t bytes);
  bool connect(Block& block, Block& other, Entry& entry);
  bool extend(Block& block, const at::Tensor& x, Range range, int64_t bytes);
  // `share`: compressed share of its bytes, where the plan chooses the codec.
  bool move(Block& block, double share = 0, double density = 0);
  bool may_move(Block& block);  // not if its storage has other memory now; then it stays
  void moved(Block& block, std::vector<std::shared_ptr<Transfer>> transfers);  // or kept, without any
  std::vector<std::shared_ptr<Transfer>> send(Block& block, const c10::Storage& source, const Ranges& runs,
                                              at::ScalarType dtype, Codec codec, const EventPtr& ready, double density,
                                              double share);
  std::vector<std::shared_ptr<Transfer>> start(Block& block, const c10::Storage& source, const Ranges& runs,
                                               at::ScalarType dtype, Codec codec, const EventPtr& ready, double density,
                                               double share);
  // Whether it is small enough to share its events; the rest of `bytes` is of those that it would share them with.
  bool joins(const Block& block, size_t count, int64_t bytes) const;
  void postpone(const std::shared_ptr<Block>& block, double density);
  // Moves what was postponed. `ready`: an event of the stream of the saves, behind these, or null.
  void move_postponed(EventPtr ready);
  void leave_forward(bool important);  // ends it without its first read
  void resume();                       // at the first read after those that had no hooks
  void forget_unhooked();              // what these held is no longer counted
  void leave(Block& block, c10::Storage source, std::vector<std::shared_ptr<Transfer>> transfers, int64_t bytes);
  void evict();
  // The bytes of a block that has not moved are complete only after the pending work of these streams, too.
  void completed_by(Block& block, c10::ArrayRef<c10::Stream> streams);
  EventPtr complete(const Block& block);  // null if one of its streams is captured
  void reserve(int64_t staging);          // counts the codec's memory
  // Makes the stream wait for copies out until `next` more bytes fit. Returns null if no wait was needed, else an event
  // behind it. `now`: an event with no work after it, or null.
  EventPtr make_room(int64_t next, EventPtr now);
  EventPtr drop_until(int64_t most, EventPtr now);     // until at most so many bytes count
  EventPtr record_read(Block& block, Packed& packed);  // the event of the read, if one was recorded
  c10::Storage bring(Block& block, EventPtr& now, bool needed);
  c10::Storage start_bring(Block& block, const EventPtr& now);
  void brought(Block& block, const c10::Storage& storage);
  void no_longer_ahead(Block& block);
  void bring_joint(std::vector<std::shared_ptr<Block>>& blocks, EventPtr& now);
  c10::Storage refilled(const Block& block) const;
  void prefetch(int64_t current, EventPtr& now);
  void prefetch_some(int64_t current, EventPtr& now);
  EventPtr boundary(bool important);
  Codec codec(bool compressed) const;

  std::unordered_map<c10::StorageImpl*, Entry, std::hash<c10::StorageImpl*>, std::equal_to<c10::StorageImpl*>,
                     Recycled<std::pair<c10::StorageImpl* const, Entry>>>
      entries_;
  std::deque<std::weak_ptr<Block>> evictable_, moved_;
  std::vector<std::weak_ptr<Block>> planned_blocks_;
  std::shared_ptr<const TransferPlan> plan_;
  std::optional<bool> capturing_;  // since the last look
  std::vector<Postponed> postponed_;
  int64_t postponed_bytes_ = 0, ahead_bytes_ = 0;
  c10::Stream postponed_on_{c10::Stream::DEFAULT, c10::Device(c10::kCPU)};
  size_t next_back_ = 0;
  int64_t previous_bytes_ = 0;
  std::shared_ptr<const TransferPlan> unhooked_;  // by which hooks went, else null
  bool resumed_ = false;
  int64_t unhooked_bytes_ = 0;  // counted at present
};

class Use : public std::enable_shared_from_this<Use> {
 public:
  // `timed`: measures operations, not only both phases; at one of `every` tensors that may move. `counting_seconds`: of
  // the host that counting non-zero elements may take, where there is no plan; of tensors from the `counts_from`th on.
  // `unhooks`: takes its hooks away after the last move. It is made by the thread that enters it.
  Use(std::shared_ptr<Engine> engine, std::map<int, std::shared_ptr<const TransferPlan>> plans, bool timed,
      double counting_seconds, int64_t counts_from, int64_t every, bool unhooks);

  std::unique_ptr<Packed> pack(PyObject* object);
  at::Tensor unpack(Packed& packed);
  void exit();
  void rehook();
  void dropped(int64_t unread);
  bool finished() const { return finished_; }
  bool unhooked() const { return unhooked_; }
  // Whether the end of an operation is measured that is the `number`th.
  bool times(int64_t number) const { return timed && number % every_ == 0; }

  std::shared_ptr<Engine> engine;
  const bool timed;
  // Seconds of the host that are left for counting, and the tensor that it is for, or from.
  double counting_seconds;
  int64_t counts_from;
  // The first tensor that there was no time to count; none: all of them were counted.
  std::optional<int64_t> uncounted_from;
  bool slow = false;  // it had to wait for the system to allocate host memory
  std::vector<std::unique_ptr<Tracker>> trackers;

 private:
  Tracker& tracker(c10::Device device);
  void keep(Packed& packed, PyObject* object, const at::Tensor& x);
  // Takes the hooks of the entered thread, unless others would see its tensors then. A backward has hooks of its own.
  void unhook(Tracker& tracker);
  void check();

  using Hooks = std::pair<c10::SafePyObject, c10::SafePyObject>;
  const int64_t every_;
  const bool unhooks_;
  const std::thread::id entered_ = std::this_thread::get_id();
  bool unhooked_ = false;
  std::optional<Hooks> taken_;  // from the thread that entered it
  std::map<int, std::shared_ptr<const TransferPlan>> plans_;
  int64_t unread_ = 0;
  bool exited_ = false, finished_ = false;
};

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  Engine(Settings settings, std::shared_ptr<Mover> mover) : settings(settings), mover(std::move(mover)) {}
  Residency& residency(c10::Device device);

  const Settings settings;
  const std::shared_ptr<Mover> mover;
  std::vector<std::unique_ptr<Residency>> residencies;
  bool pool_failed = false;
};

}  // namespace weft::offload
