// The ledger of an offload object: what is saved for backward, what of it is the same memory, what it counts against
// the budget, what moves and when it comes back. It is asked at every tensor that autograd saves (pack) and reads
// (unpack).
//
// Whose is what. A graph owns its Packed, one for each saved tensor; these own a Block, which is memory: a connected
// range of bytes of one storage, as one version counter sees it at one version. A Block owns the source while it is
// kept, and parcels in host memory once it moved. The Use (one `with` block and its backwards) and the Engine (the
// offload object) own no tensors: when a graph goes, its memory goes.
//
// What is the same memory. Storage, version counter and version must be the same objects and numbers, and the ranges of
// bytes must overlap; ranges that a later tensor adds or connects are added to the block. Storages are compared by
// address, while a weak reference keeps the address from being given out again. Siblings of unsafe_chunk share a
// storage and have counters of their own: they are blocks of their own. Bytes that several blocks share count for the
// first. A block whose storage got memory at another address since, by resize_, is no part of what is saved after that.
// Where that storage is alive at the read, what is read is what is in there, as torch reads it. No version counts a
// resize_: of a storage that was freed so while its copy out was under way, and refilled at the same address or let go
// since, what comes back may be wrong; parameters, whose storages FSDP2 treats so, do not move.
//
// Counting, in the order of the compute stream: a block counts from its save until the graph drops it, a moved one
// until its copy out has ended, which is either seen by the host or waited for by the stream that it was saved on. Only
// then is the source dropped: torch's allocator gives its memory to later work of that stream, which is then behind the
// copy. A moved block counts again while what came back is held by anyone. Memory is bounded so: before the bytes of
// the next save are allocated, the compute stream waits for the oldest copies out until they fit. The host never waits;
// where the copy has ended by the time the stream comes to the wait, the wait costs nothing.
//
// Cost on the host: a moved tensor takes four events (its save, the end of its copy out, its read, the end of its copy
// back), four waits and one query, a kept one none. How long a stream waited is told by the events that it waited for
// and was at: none is recorded behind a wait. Nobody asks whether a copy has ended where a wait does as well.
//
// Everything here runs under Python's lock.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/python_headers.h>

#include <array>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "offload/mover.h"

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

struct Settings {
  std::optional<int64_t> budget;
  Codec codec;
  int64_t min_bytes, keep_last;
};

// What a plan decided for the tensors of one device, in the order of their saves.
struct Expected {
  int64_t bytes, itemsize;
  bool moves;
  double share;  // that is compressed
  double density;
};
struct Schedule {
  std::vector<Expected> tensors;
  std::vector<std::pair<int64_t, int64_t>> back;  // (tensor, operation from which it may come back), in order
  int64_t room;                                   // bytes that may be counted at once
};

// One block's line in the books; outlives it.
struct Record {
  int64_t number, first_bytes, itemsize;
  int64_t bytes = 0, tensors = 0;  // bytes that no earlier block has; distinct ranges
  Reason reason;
  bool moved = false, compressed = false, in_timeline = false;
  bool uncounted = false;  // a parameter's: no budget is about it, and the planner takes it for 0 bytes
  int64_t first_read = -1, last_read = -1;  // operations
  std::vector<Count> counts;                // of the elements that are not zero
};

struct Totals {
  int64_t saved_bytes = 0, saved_tensors = 0, moved_bytes = 0, moved_tensors = 0;
  int64_t sent_bytes = 0, returned_bytes = 0;  // beside what the spans say
  int64_t compressed_tensors = 0;
  std::array<int64_t, kReasons> kept{};
};

struct Stall {
  int64_t operation;
  bool forward;
  std::string name;
  MarkPtr begin, end;
};

// One copy on the bus.
struct Span {
  bool out;
  Sent sent;
  MarkPtr begin, end;
};

class Engine;
class Use;
class Ledger;
struct Account;

// Remembers the version of a saved tensor, and raises torch's own error where it changed.
class Witness {
 public:
  explicit Witness(const at::Tensor& x);
  bool same(const Witness& other) const;
  const c10::VariableVersion& counter() const { return counter_; }
  bool changed() const { return counter_.enabled() && counter_.current_version() != version_; }
  [[noreturn]] void complain(const std::string& type, const std::string& sizes) const;

 private:
  c10::VariableVersion counter_;
  uint32_t version_, output_nr_;
  c10::weak_intrusive_ptr<c10::TensorImpl> original_;  // its memory goes all the same
  const torch::autograd::Node* producer_;              // only ever compared
  bool view_;
};

// A copy out under way: keeps the source alive and counted until it has ended.
struct Outgoing {
  c10::Storage source;
  std::vector<std::shared_ptr<Parcel>> parcels;
  int64_t bytes;
};

struct Block : std::enable_shared_from_this<Block> {
  Block(std::shared_ptr<Use> use, Ledger& ledger, const Witness& witness, c10::Stream stream)
      : use(std::move(use)), ledger(ledger), witness(witness), streams{stream} {}
  ~Block();

  std::shared_ptr<Use> use;
  Ledger& ledger;
  Witness witness;
  std::shared_ptr<Block> into;  // the block that this one was connected to
  c10::StorageImpl* key = nullptr;
  c10::Storage source;  // while kept
  std::weak_ptr<Outgoing> outgoing;
  at::ScalarType dtype;
  uintptr_t address = 0;  // of the storage's byte 0
  Range hull{0, 0};
  Ranges seen;                                   // distinct tensors
  Ranges runs;                                   // disjoint bytes
  std::vector<std::shared_ptr<Parcel>> parcels;  // one per run, once moved
  bool moved = false, eligible = false, read = false;
  int64_t bytes = 0, unread = 0;
  std::shared_ptr<Record> record;
  // When the bytes are complete: at `saved`, or, where it is null, when the streams that they were saved on have done
  // what they have to do by the time that they move.
  c10::SmallVector<c10::Stream, 1> streams;
  MarkPtr saved;
  int64_t staging = 0;  // device memory that the codec takes to bring it back
  // What came back: [hull at that time) at an offset; `held` until every reader has read it once.
  c10::weak_intrusive_ptr<c10::StorageImpl> restored{c10::intrusive_ptr<c10::StorageImpl>()};
  c10::Storage held;
  Range restored_hull{0, 0};
  int64_t restored_offset = 0;
  bool arriving = false;  // and nobody has waited for it yet

  void drop_held();

  // Whether its storage, or what of it is alive, got other memory since. That counts no version: FSDP2 frees so what it
  // gathered, and gathers it again for the backward.
  bool resized(const c10::StorageImpl& storage) const {
    return reinterpret_cast<uintptr_t>(storage.data()) != address || int64_t(storage.nbytes()) < hull.hi;
  }
};

// The block that it is a part of by now.
inline std::shared_ptr<Block> root(std::shared_ptr<Block> block) {
  while (block->into) block = block->into;
  return block;
}

// What a graph holds for one saved tensor.
struct Packed {
  explicit Packed(const at::Tensor& x) : witness(x) {}
  Packed(const Packed&) = delete;
  Packed& operator=(const Packed&) = delete;
  ~Packed();

  Witness witness;
  at::Tensor tensor;                                   // what never moves
  c10::SmallVector<std::shared_ptr<Block>, 1> blocks;  // of what never moves, for the books; else the one
  Range range{0, 0};
  c10::DispatchKeySet keys;
  caffe2::TypeMeta dtype;
  c10::DimVector sizes, strides;
  bool read = false;
};

// Device bytes of saved tensors of one device, of all uses of an object.
struct Account {
  Account(c10::Device device, bool budgeted) : device(device), budgeted(budgeted) {}
  const c10::Device device;
  const bool budgeted;                           // false: host memory, which no budget is about
  int64_t counted = 0, wanted = 0, leaving = 0;  // leaving: of counted, on the way out
  int64_t staging = 0;                           // of counted, the codec's
  std::deque<std::shared_ptr<Outgoing>> outs;
  std::vector<std::pair<c10::weak_intrusive_ptr<c10::StorageImpl>, int64_t>> restored;
  std::vector<Ledger*> open;

  void count(int64_t bytes);
  void want(int64_t bytes);
  void pop();    // the oldest copy out has ended
  void poll();   // drops what left, and what came back and was dropped
  void sweep();  // the latter alone, which asks no device
};

// The books of one use on one device.
class Ledger {
 public:
  Ledger(Engine& engine, Use& use, Account& account, std::shared_ptr<const Schedule> schedule);
  ~Ledger();

  // What has changed since the last tensor: called for every one that is saved. Whether the current stream is captured.
  bool look();
  std::shared_ptr<Block> save(const at::Tensor& x, Range range, const Witness& witness, bool may_move,
                              bool uncounted = false);
  c10::Storage read(Block& block, Packed& packed, int64_t* offset);
  void read_kept(Block& block, Packed& packed);  // of what never moves
  void parameter(const at::Tensor& x, Range range);
  bool is_parameter(const at::Tensor& x, Range range) const;
  void exit();
  void finish();
  void give_back();  // the codec's memory, where no use is open that may need it
  void end();        // the last operation ends at the latest now

  Engine& engine;
  Use& use;
  Account& account;
  Totals totals;
  int64_t peak = 0, peak_without = 0;
  int64_t saves = 0, reads = 0, forward = 0;  // of the timeline; forward: its operations, 0 while it lasts
  int64_t numbers = 0;
  std::vector<std::shared_ptr<Record>> timeline;
  std::deque<std::shared_ptr<Record>> latest;  // the last keep_last
  std::vector<MarkPtr> marks;
  std::vector<int64_t> curve;  // bytes counted at each mark
  std::vector<Stall> stalls;
  std::vector<Span> spans;
  bool ended = false;

  int64_t operation() const { return forward == 0 ? saves : forward + reads - 1; }
  void stall(MarkPtr begin, MarkPtr end, const std::string& name);
  void span(bool out, const Parcel& parcel);
  bool planned() const { return schedule_ != nullptr; }
  void forget(Block& block);

 private:
  struct Entry {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    c10::SmallVector<Block*, 1> blocks;
    Ranges parameters;
  };
  std::shared_ptr<Block> create(const at::Tensor& x, Range range, const Witness& witness, Entry& entry, Reason reason,
                                bool uncounted);
  void admit(const std::shared_ptr<Block>& block, int64_t bytes);
  bool connect(Block& block, Block& other, Entry& entry);
  bool extend(Block& block, const at::Tensor& x, Range range, int64_t bytes);
  // `share`: how much of it is compressed, where the plan has the codec.
  bool move(Block& block, double share = 0, double density = 0);
  std::vector<std::shared_ptr<Parcel>> send(Block& block, const c10::Storage& source, const Ranges& runs,
                                            at::ScalarType dtype, Codec codec, const MarkPtr& ready, double density,
                                            double share);
  void leave(Block& block, c10::Storage source, std::vector<std::shared_ptr<Parcel>> parcels, int64_t bytes);
  void evict();
  // The block, which has not moved, is complete only when what the stream has to do is done, too.
  void completed_by(Block& block, c10::ArrayRef<c10::Stream> streams);
  MarkPtr complete(const Block& block);  // null where one of its streams is captured
  void reserve(int64_t staging);         // counts the codec's memory
  // Lets the stream wait for what is on its way out until there is room for so many bytes more; null where it need not,
  // else a mark behind that. `now`: a mark with no work after it, or null.
  MarkPtr make_room(int64_t next, MarkPtr now);
  MarkPtr drop_until(int64_t most, MarkPtr now);    // bytes counted
  MarkPtr mark_read(Block& block, Packed& packed);  // the mark that was made of it, if any
  c10::Storage bring(Block& block, MarkPtr& now, bool needed);
  c10::Storage refilled(const Block& block) const;
  void prefetch(int64_t current, MarkPtr& now);
  void prefetch_some(int64_t current, MarkPtr& now);
  MarkPtr boundary(bool important);
  Codec codec(bool compressed) const;

  std::unordered_map<c10::StorageImpl*, Entry> entries_;
  std::deque<std::weak_ptr<Block>> evictable_, moved_;
  std::vector<std::weak_ptr<Block>> planned_blocks_;
  std::shared_ptr<const Schedule> schedule_;
  bool capturing_ = false;  // at the last look
  size_t next_back_ = 0;
  int64_t previous_bytes_ = 0;
};

class Use : public std::enable_shared_from_this<Use> {
 public:
  // Timed: the run time of every operation is taken, not only that of both phases.
  // Counts: elements that are not zero, where there is no plan.
  Use(std::shared_ptr<Engine> engine, std::map<int, std::shared_ptr<const Schedule>> schedules, bool timed,
      bool counts);

  std::unique_ptr<Packed> pack(PyObject* object);
  at::Tensor unpack(Packed& packed);
  void exit();
  void dropped(int64_t unread);
  bool finished() const { return finished_; }

  std::shared_ptr<Engine> engine;
  const bool timed, counts;
  bool slow = false;  // its operations had to wait until the system had more host memory
  std::vector<std::unique_ptr<Ledger>> ledgers;

 private:
  Ledger& ledger(c10::Device device);
  void keep(Packed& packed, PyObject* object, const at::Tensor& x);
  void check();

  std::map<int, std::shared_ptr<const Schedule>> schedules_;
  int64_t unread_ = 0;
  bool exited_ = false, finished_ = false;
};

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  Engine(Settings settings, std::shared_ptr<Mover> mover) : settings(settings), mover(std::move(mover)) {}
  Account& account(c10::Device device);

  const Settings settings;
  const std::shared_ptr<Mover> mover;
  std::vector<std::unique_ptr<Account>> accounts;
  bool pool_failed = false;
};

}  // namespace weft::offload
