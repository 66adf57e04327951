#include "offload/ledger.h"

#include <ATen/SparseCsrTensorUtils.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <sstream>
#include <typeinfo>

namespace weft::offload {
namespace {

namespace impl = torch::autograd::impl;

// The object that counts versions: two tensors share it or not. It lives as long as a VariableVersion refers to it.
const void* identity(const c10::VariableVersion& counter) {
  static_assert(sizeof(c10::VariableVersion) == sizeof(void*), "one pointer to the counter");
  const void* address;
  std::memcpy(&address, &counter, sizeof address);
  return address;
}

// Takes `taken` out of `ranges`.
void subtract(std::vector<Range>& ranges, const Range& taken) {
  std::vector<Range> rest;
  for (const Range& r : ranges) {
    if (!r.overlaps(taken)) {
      rest.push_back(r);
      continue;
    }
    if (r.lo < taken.lo) rest.push_back({r.lo, taken.lo});
    if (taken.hi < r.hi) rest.push_back({taken.hi, r.hi});
  }
  ranges = std::move(rest);
}

int64_t total(const std::vector<Range>& ranges) {
  int64_t bytes = 0;
  for (const Range& r : ranges) bytes += r.size();
  return bytes;
}

std::shared_ptr<Block> root(std::shared_ptr<Block> block) {
  while (block->into) block = block->into;
  return block;
}

// Whether autograd sees a view of something that requires grad.
bool is_view(const at::Tensor& x) {
  const auto* meta = impl::get_view_autograd_meta(x);
  return meta != nullptr && meta->has_bw_view() && meta->get_backward_view().base_.requires_grad();
}

// torch 2.15 names a node after the operation in its messages, 2.11 by its own name.
template <typename Node>
constexpr bool kForwardNames = requires(const Node& node) {
  node.forward_op_name();
};

template <typename Node>
std::string shown_name(const Node& node) {
  if constexpr (kForwardNames<Node>) {
    return node.forward_op_name();
  } else {
    return node.name();
  }
}

}  // namespace

Witness::Witness(const at::Tensor& x)
    : counter_(impl::version_counter(x)),
      version_(counter_.enabled() ? counter_.current_version() : 0),
      output_nr_(uint32_t(x.output_nr())),
      original_(x.getIntrusivePtr()),
      producer_(x.is_leaf() ? nullptr : x.grad_fn().get()),
      view_(is_view(x)) {}

bool Witness::same(const Witness& other) const {
  return counter_.enabled() && identity(counter_) == identity(other.counter_) && version_ == other.version_;
}

void Witness::complain(const std::string& type, const std::string& sizes) const {
  std::ostringstream message;
  message << "one of the variables needed for gradient computation has been modified by an inplace operation: [" << type
          << ' ' << sizes << ']';
  // An output is named after the node that is being evaluated, which made it; what came in after the node that made
  // what it is now.
  // A view that is gone would have got a new node.
  auto node = torch::autograd::get_current_node();
  std::string name;
  if (producer_ != nullptr && node.get() == producer_) {
    name = shown_name(*node);
  } else if (auto original = original_.lock()) {
    node = at::Tensor(std::move(original)).grad_fn();
    if (node != nullptr) name = shown_name(*node);
  } else if (view_) {
    name = kForwardNames<torch::autograd::Node> ? "AsStrided" : "AsStridedBackward0";
  }
  if (!name.empty()) message << ", which is output " << output_nr_ << " of " << name << ',';
  message << " is at version " << counter_.current_version() << "; expected version " << version_ << " instead.";
  if (torch::autograd::AnomalyMode::is_enabled())
    message
        << " Hint: the backtrace further above shows the operation that failed to compute its gradient. The variable "
           "in question was changed in there or anywhere later. Good luck!";
  else
    message << " Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
               "torch.autograd.set_detect_anomaly(True, check_nan=False).";
  throw std::runtime_error(message.str());
}

// ---- Account

void Account::count(int64_t bytes) {
  if (!budgeted) return;
  counted += bytes;
  for (Ledger* ledger : open) ledger->peak = std::max(ledger->peak, counted);
}

void Account::want(int64_t bytes) {
  wanted += bytes;
  if (!budgeted) return;
  for (Ledger* ledger : open) ledger->peak_without = std::max(ledger->peak_without, wanted);
}

void Account::pop() {
  counted -= outs.front()->bytes;
  leaving -= outs.front()->bytes;
  outs.pop_front();
}

void Account::poll() {
  while (!outs.empty() && std::ranges::all_of(outs.front()->parcels, [](auto& p) { return p->is_out(); })) pop();
  sweep();
}

void Account::sweep() {
  std::erase_if(restored, [this](const auto& entry) {
    if (!entry.first.expired()) return false;
    counted -= entry.second;
    return true;
  });
}

void Account::drop_oldest(Ledger* waiting) {
  auto& parcels = outs.front()->parcels;
  if (!std::ranges::all_of(parcels, [](auto& p) { return p->is_out(); })) {
    MarkPtr begin = waiting->engine.mover->mark(device);
    for (auto& parcel : parcels) parcel->wait_out();
    waiting->stall(std::move(begin), waiting->engine.mover->mark(device), "room");
  }
  pop();
}

// ---- Block, Packed

Block::~Block() {
  if (into != nullptr) return;
  try {
    // On its way back, and nobody waited for it: its memory must not be given out before.
    if (arriving && held)
      for (auto& parcel : parcels) parcel->wait_in(held);
    if (!moved) ledger.account.count(-bytes);
    ledger.account.want(-bytes);
    ledger.forget(*this);
  } catch (...) {  // the device is gone
  }
}

Packed::~Packed() {
  if (blocks.empty()) return;
  std::shared_ptr<Use> use = blocks.front()->use;
  int64_t unread = 0;
  if (!read)
    for (auto& block : blocks) {
      auto at = root(block);
      --at->unread, ++unread;
      if (at->unread == 0 && !at->arriving) at->held = {};
    }
  blocks.clear();
  try {
    use->dropped(unread);
  } catch (...) {  // the device is gone
  }
}

// ---- Ledger

Ledger::Ledger(Engine& engine, Use& use, Account& account, std::shared_ptr<const Schedule> schedule)
    : engine(engine), use(use), account(account), schedule_(std::move(schedule)) {
  account.open.push_back(this);
  if (schedule_ != nullptr) planned_blocks_.resize(schedule_->tensors.size());
  boundary(!engine.mover->capturing(account.device));
}

Ledger::~Ledger() {
  finish();
}

void Ledger::finish() {
  std::erase(account.open, this);
}

void Ledger::end() {
  if (forward == 0 || std::exchange(ended, true)) return;
  boundary(!engine.mover->capturing(account.device));
}

MarkPtr Ledger::boundary(bool important) {
  marks.push_back(important || !engine.mover->asynchronous() ? engine.mover->mark(account.device) : nullptr);
  curve.push_back(account.counted);
  return marks.back();
}

void Ledger::stall(MarkPtr begin, MarkPtr end, const std::string& name) {
  constexpr size_t kMost = 1 << 16;  // of a use that never ends
  if (begin == nullptr || end == nullptr || stalls.size() >= kMost) return;
  stalls.push_back({operation(), forward == 0, name, std::move(begin), std::move(end)});
}

void Ledger::span(bool out, const Parcel& parcel) {
  constexpr size_t kMost = 1 << 16;  // of a use that never ends
  if (spans.size() < kMost)
    spans.push_back({out, out ? parcel.sent : parcel.returned, out ? parcel.out_begin : parcel.in_begin,
                     out ? parcel.out_end : parcel.in_end});
  else
    (out ? totals.sent_bytes : totals.returned_bytes) += (out ? parcel.sent : parcel.returned).bytes();
}

void Ledger::parameter(const at::Tensor& x, Range range) {
  auto* key = x.storage().unsafeGetStorageImpl();
  auto [it, fresh] = entries_.try_emplace(
      key, Entry{c10::weak_intrusive_ptr<c10::StorageImpl>(x.storage().getWeakStorageImpl()), {}, {}});
  auto& ranges = it->second.parameters;
  if (std::ranges::find(ranges, range) == ranges.end()) ranges.push_back(range);
}

bool Ledger::is_parameter(const at::Tensor& x, Range range) const {
  const auto it = entries_.find(x.storage().unsafeGetStorageImpl());
  return it != entries_.end() &&
         std::ranges::any_of(it->second.parameters, [&](const Range& r) { return r.contains(range); });
}

void Ledger::forget(Block& block) {
  const auto it = entries_.find(block.key);
  if (it == entries_.end()) return;
  std::erase(it->second.blocks, &block);
  if (it->second.blocks.empty() && it->second.parameters.empty()) entries_.erase(it);
}

Codec Ledger::codec(bool compressed) const {
  if (engine.settings.codec != Codec::automatic) return engine.settings.codec;
  if (!engine.mover->asynchronous()) return Codec::automatic;  // which looks before it sends
  return compressed ? Codec::zvc : Codec::none;
}

std::shared_ptr<Block> Ledger::save(const at::Tensor& x, Range range, const Witness& witness, bool may_move) {
  auto* key = x.storage().unsafeGetStorageImpl();
  Entry& entry =
      entries_
          .try_emplace(key, Entry{c10::weak_intrusive_ptr<c10::StorageImpl>(x.storage().getWeakStorageImpl()), {}, {}})
          .first->second;
  std::shared_ptr<Block> block;
  for (size_t i = 0; i < entry.blocks.size(); ++i) {
    Block* other = entry.blocks[i];
    if (!other->witness.same(witness)) continue;
    if (std::ranges::find(other->seen, range) != other->seen.end()) return other->shared_from_this();
    if (!std::ranges::any_of(other->runs, [&](const Range& r) { return r.overlaps(range); })) continue;
    if (block == nullptr)
      block = other->shared_from_this();
    else if (connect(*block, *other, entry))
      --i;
  }
  std::vector<Range> fresh{range};
  for (Block* other : entry.blocks)
    for (const Range& run : other->runs) subtract(fresh, run);
  const int64_t bytes = total(fresh);

  Reason reason = kBudget;
  if (!may_move) reason = account.device.is_cpu() && !engine.mover->moves(account.device) ? kHost : kOther;
  const bool created = block == nullptr || !extend(*block, x, range, bytes);
  if (created) block = create(x, range, witness, entry, reason);
  Block& b = *block;
  Record& record = *b.record;
  b.seen.push_back(range);
  record.bytes += bytes, record.tensors += 1;
  totals.saved_bytes += bytes, totals.saved_tensors += 1;
  (b.moved ? totals.moved_bytes : totals.kept[record.reason]) += bytes;
  if (b.moved) totals.moved_tensors += 1;
  b.bytes += bytes;
  account.want(bytes);
  if (!b.moved) account.count(bytes);

  if (!b.moved && record.reason == kSmall && b.hull.size() >= engine.settings.min_bytes) {
    totals.kept[kSmall] -= record.bytes, totals.kept[kBudget] += record.bytes;
    record.reason = kBudget;
    b.eligible = true;
    evictable_.push_back(block);
  }
  if (created) admit(block, range.size());
  evict();
  return block;
}

// A new block: its place in the timeline, and what the plan says of it.
void Ledger::admit(const std::shared_ptr<Block>& block, int64_t bytes) {
  Block& b = *block;
  Record& record = *b.record;
  const Expected* expected = nullptr;
  if (schedule_ != nullptr && forward == 0) {
    const auto& tensors = schedule_->tensors;
    const size_t i = size_t(record.number);
    if (i < tensors.size() && tensors[i].bytes == bytes && tensors[i].itemsize == record.itemsize)
      expected = &tensors[i];
    else
      schedule_ = nullptr;
  }
  const bool moves = b.eligible && expected != nullptr && expected->moves;
  if (forward == 0) {
    b.saved = boundary(moves || (b.eligible && use.timed));
    record.in_timeline = true;
    timeline.push_back(block->record);
    ++saves;
  }
  // The first use looks at what may be worth compressing; the next ones know by what they compressed.
  // Without a budget nothing is compressed.
  if (schedule_ == nullptr && forward == 0 && b.eligible && engine.settings.budget &&
      engine.settings.codec == Codec::automatic) {
    const Bytes bytes{b.source, b.hull.lo, b.hull.hi, b.dtype};
    if (compressible(bytes)) record.counts = {engine.mover->count(bytes)};
  }
  if (expected != nullptr) planned_blocks_[size_t(record.number)] = block;
  if (moves) move(b, expected->compressed, expected->density);
  if (b.eligible) evictable_.push_back(block);
  if (account.outs.empty() || engine.mover->capturing(account.device)) return;
  if (schedule_ != nullptr && forward == 0) {
    const size_t next = size_t(record.number) + 1;
    make_room(next < schedule_->tensors.size() ? schedule_->tensors[next].bytes : 0);
  } else if (engine.settings.budget) {
    // What the operations that run need stays: the tensor just saved and the one before it.
    make_room(std::min<int64_t>(0, *engine.settings.budget - bytes - previous_bytes_));
  }
  previous_bytes_ = bytes;
}

std::shared_ptr<Block> Ledger::create(const at::Tensor& x, Range range, const Witness& witness, Entry& entry,
                                      Reason reason) {
  auto block = std::make_shared<Block>(use.shared_from_this(), *this, witness);
  block->key = x.storage().unsafeGetStorageImpl();
  block->source = x.storage();
  block->dtype = x.scalar_type();
  block->address = reinterpret_cast<uintptr_t>(x.storage().data());
  block->hull = range;
  block->runs = {range};
  if (reason == kBudget && range.size() < engine.settings.min_bytes) reason = kSmall;
  block->eligible = reason == kBudget;
  block->record = std::make_shared<Record>(
      Record{.number = numbers++, .first_bytes = range.size(), .itemsize = int64_t(x.itemsize()), .reason = reason});
  entry.blocks.push_back(block.get());
  latest.push_back(block->record);
  if (int64_t(latest.size()) > engine.settings.keep_last) latest.pop_front();
  return block;
}

// ---- Moving

std::vector<std::shared_ptr<Parcel>> Ledger::send(const c10::Storage& source, const std::vector<Range>& runs,
                                                  at::ScalarType dtype, Codec codec, const MarkPtr& ready,
                                                  double density) {
  std::vector<std::shared_ptr<Parcel>> parcels;
  MarkPtr begin = engine.mover->asynchronous() ? nullptr : engine.mover->mark(account.device);
  for (const Range& run : runs) {
    auto parcel = engine.mover->out({source, run.lo, run.hi, dtype}, codec, ready, density);
    if (parcel == nullptr) {
      engine.pool_failed = true;
      return {};
    }
    parcels.push_back(std::move(parcel));
  }
  if (begin != nullptr) stall(std::move(begin), engine.mover->mark(account.device), "copy out");
  for (auto& parcel : parcels) span(true, *parcel);
  return parcels;
}

void Ledger::leave(Block& block, c10::Storage source, std::vector<std::shared_ptr<Parcel>> parcels, int64_t bytes) {
  auto outgoing = std::make_shared<Outgoing>(std::move(source), parcels, bytes);
  block.outgoing = outgoing;
  account.leaving += bytes;
  account.outs.push_back(std::move(outgoing));
  block.parcels.insert(block.parcels.end(), parcels.begin(), parcels.end());
}

bool Ledger::move(Block& block, bool compressed, double density) {
  Record& record = *block.record;
  block.eligible = false;
  const Codec chosen = codec(compressed);
  if (chosen != Codec::none && compressible(block.dtype)) {
    const int64_t staging = engine.mover->staging(block.hull.size(), record.itemsize, density);
    if (staging > account.staging) account.count(staging - std::exchange(account.staging, staging));
  }
  auto parcels = send(block.source, block.runs, block.dtype, chosen, block.saved, density);
  if (parcels.empty()) {
    totals.kept[record.reason] -= record.bytes, totals.kept[kPool] += record.bytes;
    record.reason = kPool;
    return false;
  }
  block.moved = record.moved = true;
  totals.kept[record.reason] -= record.bytes;
  totals.moved_bytes += record.bytes, totals.moved_tensors += record.tensors;
  record.compressed = std::ranges::any_of(parcels, [](auto& p) { return p->compressed; });
  if (record.compressed) totals.compressed_tensors += record.tensors;
  if (std::ranges::all_of(parcels, [](auto& p) { return !p->sent.parts.empty(); })) {
    record.counts.clear();
    for (auto& p : parcels)
      for (const auto& part : p->sent.parts) record.counts.push_back(part.count);
  }
  leave(block, std::move(block.source), std::move(parcels), block.bytes);
  block.source = {};
  moved_.push_back(block.weak_from_this());
  if (!engine.mover->asynchronous()) account.poll();
  return true;
}

// Lets `other` become part of `block`; both are of one storage, counter and version.
bool Ledger::connect(Block& block, Block& other, Entry& entry) {
  if (block.moved != other.moved) {
    Block& kept = block.moved ? other : block;
    if (kept.source && !move(kept, false)) return false;
  }
  auto at = other.shared_from_this();
  block.runs.insert(block.runs.end(), other.runs.begin(), other.runs.end());
  block.parcels.insert(block.parcels.end(), other.parcels.begin(), other.parcels.end());
  block.seen.insert(block.seen.end(), other.seen.begin(), other.seen.end());
  block.hull = {std::min(block.hull.lo, other.hull.lo), std::max(block.hull.hi, other.hull.hi)};
  if (!other.outgoing.expired()) block.outgoing = other.outgoing;
  block.bytes += std::exchange(other.bytes, 0);
  block.unread += std::exchange(other.unread, 0);
  if (std::exchange(other.arriving, false))
    for (auto& parcel : other.parcels) parcel->wait_in(other.held);
  other.held = {};
  other.source = {};
  Record &into = *block.record, &from = *other.record;
  if (!block.moved) totals.kept[from.reason] -= from.bytes, totals.kept[into.reason] += from.bytes;
  into.bytes += std::exchange(from.bytes, 0);
  into.tensors += std::exchange(from.tensors, 0);
  std::erase(entry.blocks, &other);
  other.into = block.shared_from_this();
  return true;
}

// Takes a range that overlaps the block's into it. False without host memory where the block has moved already.
bool Ledger::extend(Block& block, const at::Tensor& x, Range range, int64_t bytes) {
  std::vector<Range> missing{range};
  for (const Range& run : block.runs) subtract(missing, run);
  if (block.moved && !missing.empty()) {
    // Complete as of now: what was saved first may be older than these bytes.
    auto parcels = send(x.storage(), missing, x.scalar_type(), codec(block.record->compressed),
                        engine.mover->mark(account.device), 0);
    if (parcels.empty()) return false;
    account.count(bytes);
    leave(block, x.storage(), std::move(parcels), bytes);
    if (!engine.mover->asynchronous()) account.poll();
  }
  block.runs.insert(block.runs.end(), missing.begin(), missing.end());
  block.hull = {std::min(block.hull.lo, range.lo), std::max(block.hull.hi, range.hi)};
  return true;
}

void Ledger::evict() {
  const auto over = [&] { return account.counted - account.leaving > *engine.settings.budget; };
  if (!engine.settings.budget || !over() || engine.mover->capturing(account.device)) return;
  while (over() && !evictable_.empty()) {
    auto block = evictable_.front().lock();
    if (block != nullptr && block->into == nullptr && block->eligible && !block->moved && !block->read) {
      if (block->record->number >= numbers - engine.settings.keep_last) return;
      move(*block, false);
    }
    evictable_.pop_front();
  }
}

bool Ledger::make_room(int64_t next) {
  int64_t limit = std::numeric_limits<int64_t>::max() / 2;
  if (schedule_ != nullptr)
    limit = schedule_->room;
  else if (engine.settings.budget)
    limit = *engine.settings.budget;
  if (account.outs.empty() || account.counted + next <= limit) return false;
  while (!account.outs.empty() && account.counted + next > limit) account.drop_oldest(this);
  return true;
}

// ---- Coming back

MarkPtr Ledger::mark_read(Block& block, Packed& packed) {
  if (packed.read) return nullptr;
  MarkPtr mark;
  const bool first = forward == 0;
  if (first) {
    forward = saves + 1;
    if (schedule_ != nullptr && schedule_->tensors.size() != size_t(saves)) schedule_ = nullptr;
  }
  if (!std::exchange(block.read, true) && block.record->in_timeline) {
    block.record->first_read = forward + reads++;
    const bool important = first || block.moved || (block.eligible && use.timed);
    mark = boundary(important && !engine.mover->capturing(account.device));
  }
  if (block.record->in_timeline) block.record->last_read = operation();
  return mark;
}

// The storage to read `packed` from, and what to add to its bytes' positions there.
c10::Storage Ledger::read(Block& block, Packed& packed, int64_t* offset) {
  const bool capturing = engine.mover->capturing(account.device);
  capturing ? account.sweep() : account.poll();
  MarkPtr now = mark_read(block, packed);
  c10::Storage storage;
  *offset = 0;
  if (block.source) {
    storage = block.source;
  } else if (auto outgoing = block.outgoing.lock()) {
    storage = outgoing->source;  // still here
  } else {
    if (auto alive = block.restored.lock(); alive && block.restored_hull.contains(packed.range))
      storage = c10::Storage(std::move(alive));
    else
      storage = bring(block, now, true);
    // Every reader waits: the one before may have been on another stream.
    const bool here = std::ranges::all_of(block.parcels, [](auto& p) { return p->is_in(); });
    MarkPtr begin = here ? nullptr : now != nullptr ? now : engine.mover->mark(account.device);
    for (auto& parcel : block.parcels) parcel->wait_in(storage);
    if (!here && block.arriving) stall(std::move(begin), engine.mover->mark(account.device), "copy back");
    block.arriving = false;
    *offset = block.restored_offset;
  }
  if (!std::exchange(packed.read, true) && --block.unread == 0) block.held = {};
  prefetch(block.moved ? block.hull.size() : 0, now);
  return storage;
}

void Ledger::read_kept(Block& block, Packed& packed) {
  MarkPtr now = mark_read(block, packed);
  prefetch(0, now);
}

c10::Storage Ledger::bring(Block& block, MarkPtr& now, bool needed) {
  const int64_t bytes = block.hull.size(), wanted = int64_t((block.address + uintptr_t(block.hull.lo)) % 256);
  const auto position = [](const c10::Storage& s) { return int64_t(reinterpret_cast<uintptr_t>(s.data()) % 256); };
  // What is allocated now may be memory that just left: `now` has to be behind what the stream waits for.
  if (needed && !engine.mover->capturing(account.device) && make_room(bytes)) now = engine.mover->mark(account.device);
  c10::Storage storage = block.parcels.front()->home();
  block.restored_hull = block.hull;
  block.restored_offset = 0;
  if (!storage) {
    storage = engine.mover->allocate(account.device, bytes + wanted);
    if (position(storage) != 0) storage = engine.mover->allocate(account.device, bytes + 255);
    block.restored_offset = ((wanted - position(storage)) & 255) - block.hull.lo;
  }
  block.restored = c10::weak_intrusive_ptr<c10::StorageImpl>(storage.getWeakStorageImpl());
  account.count(bytes);
  account.restored.emplace_back(block.restored, bytes);
  MarkPtr begin = engine.mover->asynchronous() ? nullptr : engine.mover->mark(account.device);
  size_t started = 0;
  try {
    for (; started < block.runs.size(); ++started) {
      const Range& run = block.runs[started];
      Parcel& parcel = *block.parcels[started];
      parcel.start_in({storage, run.lo + block.restored_offset, run.hi + block.restored_offset, block.dtype}, now);
      span(false, parcel);
    }
  } catch (...) {  // what is on its way to memory that is about to be free
    for (size_t i = 0; i < started; ++i) block.parcels[i]->wait_in(storage);
    throw;
  }
  if (begin != nullptr) stall(std::move(begin), engine.mover->mark(account.device), "copy back");
  block.arriving = true;
  if (block.unread > 0) block.held = storage;
  return storage;
}

void Ledger::prefetch(int64_t current, MarkPtr& now) {
  const bool any = schedule_ != nullptr ? next_back_ < schedule_->back.size() : !moved_.empty();
  if (!any || !engine.mover->asynchronous() || engine.mover->capturing(account.device)) return;
  try {
    prefetch_some(current, now);
  } catch (const c10::OutOfMemoryError&) {  // later, then: nobody needs it yet
  }
}

void Ledger::prefetch_some(int64_t current, MarkPtr& now) {
  const auto wanted = [](const std::shared_ptr<Block>& b) { return b && b->moved && !b->read && !b->held; };
  if (schedule_ != nullptr) {
    for (; next_back_ < schedule_->back.size(); ++next_back_) {
      const auto [tensor, from] = schedule_->back[next_back_];
      auto block = planned_blocks_[size_t(tensor)].lock();
      if (block != nullptr) block = root(block);
      if (!wanted(block)) continue;
      if (from > operation() || !block->outgoing.expired()) return;
      if (account.counted + block->hull.size() > schedule_->room) return;
      bring(*block, now, false);
    }
    return;
  }
  // Nothing is known: the order of the saves backwards, as far as there is room, and one tensor ahead at least.
  while (!moved_.empty()) {
    auto block = moved_.back().lock();
    if (block != nullptr) block = root(block);
    if (wanted(block)) {
      if (!block->outgoing.expired()) return;
      const int64_t bytes = block->hull.size();
      if (account.counted + bytes > std::max(engine.settings.budget.value_or(0), current + bytes)) return;
      bring(*block, now, false);
    }
    moved_.pop_back();
  }
}

// The end of the `with` block: compute waits for what is on its way out, so that its memory is free.
void Ledger::exit() {
  if (engine.mover->capturing(account.device)) return;
  account.poll();
  while (!account.outs.empty()) account.drop_oldest(this);
}

// ---- Use, Engine

namespace {

// Whether the dimensions have names, which torch 2.15 no longer knows.
template <typename Impl>
bool named(const Impl& t) {
  if constexpr (requires { t.has_named_tensor_meta(); }) {
    return t.has_named_tensor_meta();
  } else {
    return false;
  }
}

bool plain(PyObject* object, const at::Tensor& x) {
  using c10::DispatchKey;
  const c10::TensorImpl& t = *x.unsafeGetTensorImpl();
  if (typeid(t) != typeid(c10::TensorImpl) || !THPVariable_CheckExact(object)) return false;
  if (x.layout() != at::kStrided || !(x.is_cpu() || x.is_cuda()) || t.has_symbolic_sizes_strides()) return false;
  if (x.key_set().has_any(c10::DispatchKeySet({DispatchKey::Python, DispatchKey::Functionalize, DispatchKey::ZeroTensor,
                                               DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchGradWrapper})))
    return false;
  return x.has_storage() && !named(t) && x.storage().data() != nullptr;
}

Range bytes_of(const at::Tensor& x) {
  int64_t elements = 1;
  for (int64_t d = 0; d < x.dim(); ++d) elements += (x.size(d) - 1) * x.stride(d);
  const int64_t lo = x.storage_offset() * int64_t(x.itemsize());
  return {lo, lo + elements * int64_t(x.itemsize())};
}

// Shares memory and version counter with x, and has no history: what a graph holds must not hold the graph.
at::Tensor shared(const at::Tensor& x) {
  return at::Tensor(x.unsafeGetTensorImpl()->shallow_copy_and_detach(impl::version_counter(x), true));
}

bool parameter(const at::TensorBase& x) {
  return x.requires_grad() && x.is_leaf();
}

}  // namespace

Use::Use(std::shared_ptr<Engine> engine, std::map<int, std::shared_ptr<const Schedule>> schedules, bool timed)
    : engine(std::move(engine)), timed(timed), schedules_(std::move(schedules)) {}

Ledger& Use::ledger(c10::Device device) {
  for (auto& ledger : ledgers)
    if (ledger->account.device == device) return *ledger;
  const auto it = schedules_.find(device.is_cpu() ? -1 : device.index());
  ledgers.push_back(
      std::make_unique<Ledger>(*engine, *this, engine->account(device), it == schedules_.end() ? nullptr : it->second));
  return *ledgers.back();
}

std::unique_ptr<Packed> Use::pack(PyObject* object) {
  const at::Tensor& x = THPVariable_Unpack(object);
  auto packed = std::make_unique<Packed>(x);
  if (!plain(object, x)) {
    keep(*packed, object, x);
    return packed;
  }
  const bool leaf = parameter(x);
  if (x.numel() == 0) {
    packed->tensor = leaf ? x : shared(x);
    return packed;
  }
  const Range range = bytes_of(x);
  const c10::Device device = x.device();
  Ledger& books = ledger(device);
  if (leaf || (x.is_view() && parameter(x._base())) || books.is_parameter(x, range)) {
    if (leaf) books.parameter(x, range);
    packed->tensor = leaf ? x : shared(x);
    return packed;
  }
  const bool capturing = engine->mover->capturing(device);
  const bool aligned = reinterpret_cast<uintptr_t>(x.storage().data()) % x.itemsize() == 0;
  capturing ? books.account.sweep() : books.account.poll();
  auto block = books.save(x, range, packed->witness,
                          engine->mover->moves(device) && !capturing && aligned && engine->mover->holds(x.storage()));
  ++block->unread;
  ++unread_;
  packed->blocks.push_back(std::move(block));
  packed->range = range;
  packed->keys = x.key_set();
  packed->dtype = x.dtype();
  packed->sizes = x.sizes();
  packed->strides = x.strides();
  return packed;
}

// What is no plain tensor stays as it is; the memory of its parts is counted.
void Use::keep(Packed& packed, PyObject* object, const at::Tensor& x) {
  const auto handle = py::handle(object);
  packed.tensor = parameter(x) ? x : handle.attr("detach")().cast<at::Tensor>();
  if (parameter(x)) return;
  std::vector<at::Tensor> parts;
  if (py::hasattr(handle, "__tensor_flatten__")) {
    const py::list names = py::tuple(handle.attr("__tensor_flatten__")())[0];
    for (auto name : names) parts.push_back(py::getattr(handle, name).cast<at::Tensor>());
  } else if (x.key_set().has(c10::DispatchKey::Python)) {
    return;
  } else if (x.layout() == at::kSparse) {
    parts = {x._indices(), x._values()};
  } else if (at::sparse_csr::is_sparse_compressed(x)) {
    auto [compressed, plain] = at::sparse_csr::getCompressedPlainIndices(x);
    parts = {compressed, plain, x.values()};
  } else if (x.layout() == at::kStrided && x.has_storage()) {
    parts = {x};
  }
  for (const at::Tensor& part : parts) {
    if (!part.has_storage() || part.numel() == 0 || part.is_meta() || part.storage().data() == nullptr) continue;
    const auto bytes = int64_t(part.storage().nbytes());
    auto block = ledger(part.device()).save(part, {0, bytes}, Witness(part), false);
    ++block->unread;
    ++unread_;
    packed.blocks.push_back(std::move(block));
  }
}

at::Tensor Use::unpack(Packed& packed) {
  if (packed.witness.changed()) {
    const at::Tensor x =
        packed.tensor.defined()
            ? packed.tensor
            : at::empty({0}, at::TensorOptions(packed.dtype).device(root(packed.blocks[0])->ledger.account.device));
    std::ostringstream sizes;
    sizes << (packed.tensor.defined() ? packed.tensor.sizes() : at::IntArrayRef(packed.sizes));
    packed.witness.complain(torch::processErrorMsg(x.toString()), sizes.str());
  }
  if (packed.tensor.defined()) {
    for (auto& block : packed.blocks) {
      auto at = root(block);
      at->ledger.read_kept(*at, packed);
      if (!packed.read) --at->unread, --unread_;
    }
    packed.read = true;
    check();
    return packed.tensor;
  }
  const bool first = !packed.read;
  auto block = root(packed.blocks[0]);
  int64_t offset;
  c10::Storage storage = block->ledger.read(*block, packed, &offset);
  if (first) --unread_;
  check();
  at::Tensor x = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), packed.keys, packed.dtype);
  c10::TensorImpl& t = *x.unsafeGetTensorImpl();
  t.set_sizes_and_strides(packed.sizes, packed.strides, (packed.range.lo + offset) / int64_t(packed.dtype.itemsize()));
  // A later change of the saved tensor is one of this one, as without hooks.
  t.set_version_counter(packed.witness.counter());
  return x;
}

void Use::dropped(int64_t unread) {
  unread_ -= unread;
  if (unread_ == 0)
    for (auto& ledger : ledgers) ledger->end();
  check();
}

void Use::check() {
  if (finished_ || !exited_ || unread_ > 0) return;
  finished_ = true;
  for (auto& ledger : ledgers) ledger->finish();
  engine->mover->settle();
}

void Use::exit() {
  exited_ = true;
  for (auto& ledger : ledgers) ledger->exit();
  check();
}

Account& Engine::account(c10::Device device) {
  for (auto& account : accounts)
    if (account->device == device) return *account;
  accounts.push_back(std::make_unique<Account>(device, !device.is_cpu() || mover->moves(device)));
  return *accounts.back();
}

}  // namespace weft::offload
