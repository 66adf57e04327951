#include "offload/tracker/tracker.h"

#include <algorithm>
#include <limits>

#include "offload/policy/policy.h"

namespace weft::offload {
namespace {

constexpr size_t kMostSpans = 1 << 16;  // of a use that never ends

// Removes `taken` from `ranges`.
void subtract(Ranges& ranges, const Range& taken) {
  Ranges rest;
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

int64_t total(const Ranges& ranges) {
  int64_t bytes = 0;
  for (const Range& r : ranges) bytes += r.size();
  return bytes;
}

}  // namespace

// ---- Residency

void Residency::count(int64_t bytes) {
  if (!budgeted) return;
  counted += bytes;
  for (Tracker* tracker : open) tracker->peak = std::max(tracker->peak, counted);
}

void Residency::want(int64_t bytes) {
  wanted += bytes;
  if (!budgeted) return;
  for (Tracker* tracker : open) tracker->peak_without = std::max(tracker->peak_without, wanted);
}

void Residency::pop() {
  counted -= outs.front()->bytes;
  leaving -= outs.front()->bytes;
  outs.pop_front();
}

void Residency::poll() {
  while (!outs.empty() && std::ranges::all_of(outs.front()->transfers, [](auto& p) { return p->is_out(true); })) pop();
  sweep();
  polled = std::chrono::steady_clock::now();
}

bool Residency::due() const {
  constexpr auto kEvery = std::chrono::microseconds(100);
  return std::chrono::steady_clock::now() - polled >= kEvery;
}

void Residency::sweep() {
  std::erase_if(restored, [this](const auto& entry) {
    if (!entry.first.expired()) return false;
    counted -= entry.second;
    return true;
  });
}

// ---- Block

Block::~Block() {
  if (into != nullptr) return;
  try {
    drop_held();
    if (!record->uncounted) {
      if (!moved) tracker.residency.count(-bytes);
      tracker.residency.want(-bytes);
    }
    tracker.forget(*this);
  } catch (...) {  // the device is gone
  }
}

void Block::drop_held() {
  // A copy back that no stream has waited for: its memory must not be reused before it ends. If it has ended no wait is
  // enqueued, since the stream may be captured.
  if (std::exchange(arriving, false) && held)
    for (auto& transfer : transfers)
      if (transfer->here == nullptr || !transfer->here->completed()) transfer->wait_in(held);
  held = {};
}

// ---- Tracker

Tracker::Tracker(Engine& engine, Use& use, Residency& residency, std::shared_ptr<const TransferPlan> plan)
    : engine(engine), use(use), residency(residency), plan_(std::move(plan)) {
  residency.open.push_back(this);
  if (plan_ != nullptr) planned_blocks_.resize(plan_->tensors.size());
  boundary(!engine.mover->capturing(residency.device));
}

Tracker::~Tracker() {
  try {
    finish();
  } catch (...) {  // the device is gone
  }
}

void Tracker::look(bool read) {
  capturing_.reset();
  if (!read) residency.sweep();
  if (!residency.outs.empty() && residency.due() && !capturing()) residency.poll();
}

bool Tracker::stays() const {
  return plan_ != nullptr && !engine.settings.budget && !use.timed && forward == 0 &&
         size_t(numbers) < plan_->tensors.size() && !plan_->tensors[size_t(numbers)].moves;
}

bool Tracker::capturing() {
  if (!capturing_) capturing_ = engine.mover->capturing(residency.device);
  return *capturing_;
}

void Tracker::finish() {
  forget_unhooked();
  std::erase(residency.open, this);
  give_back();
}

void Tracker::give_back() {
  if (!residency.open.empty() || residency.staging == 0) return;
  residency.count(-std::exchange(residency.staging, 0));
  engine.mover->settle(residency.device);
}

void Tracker::reserve(int64_t staging) {
  if (staging > residency.staging) residency.count(staging - std::exchange(residency.staging, staging));
}

void Tracker::end() {
  if (forward == 0 || std::exchange(ended, true)) return;
  boundary(!engine.mover->capturing(residency.device));
}

EventPtr Tracker::boundary(bool important) {
  events.push_back(important || !engine.mover->asynchronous() ? engine.mover->record(residency.device) : nullptr);
  curve.push_back(residency.counted);
  return events.back();
}

void Tracker::stall(EventPtr begin, EventPtr end, const std::string& name) {
  constexpr size_t kMost = 1 << 16;  // of a use that never ends
  if (begin == nullptr || end == nullptr || stalls.size() >= kMost) return;
  stalls.push_back({operation(), forward == 0, name, std::move(begin), std::move(end)});
}

void Tracker::span(bool out, const Transfer& transfer) {
  if (spans.size() < kMostSpans)
    spans.push_back({out, out ? transfer.sent : transfer.returned, out ? transfer.out_begin : transfer.in_begin,
                     out ? transfer.out_end : transfer.in_end});
  else
    (out ? totals.sent_bytes : totals.returned_bytes) += (out ? transfer.sent : transfer.returned).bytes();
}

// One for all of a joint copy.
void Tracker::span_joint(bool out, const std::vector<std::vector<std::shared_ptr<Transfer>>>& transfers) {
  const Transfer *first = nullptr, *last = nullptr;
  Sent sent;
  for (const auto& of_block : transfers)
    for (const auto& transfer : of_block) {
      sent.fixed += (out ? transfer->sent : transfer->returned).fixed;
      if (first == nullptr) first = transfer.get();
      last = transfer.get();
    }
  if (first == nullptr) return;
  if (spans.size() < kMostSpans)
    spans.push_back({out, sent, out ? first->out_begin : first->in_begin, out ? last->out_end : last->in_end});
  else
    (out ? totals.sent_bytes : totals.returned_bytes) += sent.bytes();
}

void Tracker::parameter(const at::Tensor& x, Range range) {
  auto* key = x.storage().unsafeGetStorageImpl();
  auto [it, fresh] = entries_.try_emplace(
      key, Entry{c10::weak_intrusive_ptr<c10::StorageImpl>(x.storage().getWeakStorageImpl()), {}, {}});
  auto& ranges = it->second.parameters;
  if (std::ranges::find(ranges, range) == ranges.end()) ranges.push_back(range);
}

bool Tracker::is_parameter(const at::Tensor& x, Range range) const {
  const auto it = entries_.find(x.storage().unsafeGetStorageImpl());
  return it != entries_.end() &&
         std::ranges::any_of(it->second.parameters, [&](const Range& r) { return r.contains(range); });
}

void Tracker::forget(Block& block) {
  no_longer_ahead(block);
  const auto it = entries_.find(block.key);
  if (it == entries_.end()) return;
  auto& blocks = it->second.blocks;
  if (const auto at = std::ranges::find(blocks, &block); at != blocks.end()) blocks.erase(at);
  if (blocks.empty() && it->second.parameters.empty()) entries_.erase(it);
}

Codec Tracker::codec(bool compressed) const {
  if (engine.settings.codec != Codec::automatic) return engine.settings.codec;
  if (!engine.mover->asynchronous()) return Codec::automatic;  // which looks before it sends
  return compressed ? Codec::zvc : Codec::none;
}

std::shared_ptr<Block> Tracker::save(const at::Tensor& x, Range range, const VersionCheck& version, bool may_move,
                                     bool uncounted) {
  auto* key = x.storage().unsafeGetStorageImpl();
  Entry& entry =
      entries_
          .try_emplace(key, Entry{c10::weak_intrusive_ptr<c10::StorageImpl>(x.storage().getWeakStorageImpl()), {}, {}})
          .first->second;
  std::shared_ptr<Block> block;
  for (size_t i = 0; i < entry.blocks.size(); ++i) {
    Block* other = entry.blocks[i];
    if (other->resized(*key) || !other->version.same(version)) continue;
    if (std::ranges::find(other->seen, range) != other->seen.end()) {
      other->record->saved_again = saves;
      return other->shared_from_this();
    }
    if (!std::ranges::any_of(other->runs, [&](const Range& r) { return r.overlaps(range); })) continue;
    if (block == nullptr)
      block = other->shared_from_this();
    else if (connect(*block, *other, entry))
      --i;
  }
  Ranges fresh{range};
  for (Block* other : entry.blocks) {
    if (other->resized(*key)) continue;  // other memory
    for (const Range& run : other->runs) subtract(fresh, run);
  }
  const int64_t bytes = total(fresh);

  Reason reason = kBudget;
  if (!may_move) reason = residency.device.is_cpu() && !engine.mover->moves(residency.device) ? kHost : kOther;
  const bool created = block == nullptr || !extend(*block, x, range, bytes);
  if (created) block = create(x, range, version, entry, reason, uncounted);
  Block& b = *block;
  Record& record = *b.record;
  if (!created) record.saved_again = saves;
  b.seen.push_back(range);
  record.bytes += bytes, record.tensors += 1;
  totals.saved_bytes += bytes, totals.saved_tensors += 1;
  (b.moved ? totals.moved_bytes : totals.kept[record.reason]) += bytes;
  if (b.moved) totals.moved_tensors += 1;
  b.bytes += bytes;
  if (!record.uncounted) {
    residency.want(bytes);
    if (!b.moved) residency.count(bytes);
  }

  if (!b.moved && record.reason == kSmall && b.hull.size() >= engine.settings.min_bytes && !capturing()) {
    totals.kept[kSmall] -= record.bytes, totals.kept[kBudget] += record.bytes;
    record.reason = kBudget;
    b.eligible = true;
    if (engine.settings.budget) evictable_.push_back(block);
  }
  if (created) admit(block, record.first_bytes);
  evict();
  return block;
}

// A new block: enters it into the timeline, and does what the plan says.
void Tracker::admit(const std::shared_ptr<Block>& block, int64_t bytes) {
  Block& b = *block;
  Record& record = *b.record;
  const Expected* expected = nullptr;
  if (plan_ != nullptr && forward == 0) {
    const auto& tensors = plan_->tensors;
    const size_t i = size_t(record.number);
    if (i < tensors.size() && tensors[i].bytes == bytes && tensors[i].itemsize == record.itemsize)
      expected = &tensors[i];
    else
      plan_ = nullptr;
  }
  const bool moves = b.eligible && expected != nullptr && expected->moves;
  const c10::Stream current = b.streams.front();
  if (!postponed_.empty() && postponed_on_ != current) move_postponed(nullptr);
  const bool later = moves && codec(expected->share > 0) == Codec::none && joins(b, 0, 0);
  // The events of a joint copy are shared: the last of its tensors records the one of their saves.
  const bool last = later && !joins(b, postponed_.size() + 1, postponed_bytes_);
  if (forward == 0) {
    b.saved = boundary((moves && (!later || last)) || (b.eligible && use.times(record.number)));
    record.in_timeline = true;
    timeline.push_back(block->record);
    ++saves;
  }
  // The first uses count the zeros of what may be worth compressing; later ones learn them from compressing.
  const bool counts =
      plan_ == nullptr && forward == 0 && b.eligible && record.number >= use.counts_from && !capturing();
  if (counts && engine.settings.codec == Codec::automatic) {
    const Bytes bytes{b.source, b.hull.lo, b.hull.hi, b.dtype};
    const auto began = std::chrono::steady_clock::now();
    try {
      if (use.counting_seconds <= 0)
        use.uncounted_from = std::min(use.uncounted_from.value_or(record.number), record.number);
      else if (compressible(bytes))
        record.counts = {engine.mover->count(bytes)};
    } catch (const NoHostMemory&) {  // then the density is unknown
    } catch (const c10::OutOfMemoryError&) {
    }
    use.counting_seconds -= std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  }
  if (expected != nullptr) planned_blocks_[size_t(record.number)] = block;
  if (later)
    postpone(block, expected->density);
  else if (moves)
    move(b, expected->share, expected->density);
  if (last) move_postponed(b.saved);
  if (b.eligible && !later && engine.settings.budget) evictable_.push_back(block);
  const int64_t previous = std::exchange(previous_bytes_, bytes);
  int64_t next = 0;
  if (plan_ != nullptr && forward == 0) {
    const size_t after = size_t(record.number) + 1;
    next = after < plan_->tensors.size() ? plan_->tensors[after].bytes : 0;
    // What leaves already does not make room enough.
    if (residency.counted - residency.leaving > plan_->room - next) move_postponed(b.saved);
  } else {
    move_postponed(b.saved);
  }
  if (residency.outs.empty() || capturing()) return;
  if (plan_ != nullptr && forward == 0) {
    make_room(next, b.saved);
  } else if (engine.settings.budget) {
    // Running operations need the tensor just saved and the one before it: these stay.
    make_room(std::min<int64_t>(0, *engine.settings.budget - bytes - previous), nullptr);
  }
}

std::shared_ptr<Block> Tracker::create(const at::Tensor& x, Range range, const VersionCheck& version, Entry& entry,
                                       Reason reason, bool uncounted) {
  auto block = std::allocate_shared<Block>(Recycled<Block>(), use.shared_from_this(), *this, version,
                                           engine.mover->stream(residency.device));
  block->key = x.storage().unsafeGetStorageImpl();
  block->source = x.storage();
  block->dtype = x.scalar_type();
  block->address = reinterpret_cast<uintptr_t>(x.storage().data());
  block->hull = range;
  block->runs = {range};
  if (reason == kBudget && range.size() < engine.settings.min_bytes) reason = kSmall;
  block->eligible = reason == kBudget;
  block->record = std::allocate_shared<Record>(Recycled<Record>(), Record{.number = numbers++,
                                                                          .first_bytes = uncounted ? 0 : range.size(),
                                                                          .itemsize = int64_t(x.itemsize()),
                                                                          .reason = reason,
                                                                          .uncounted = uncounted});
  entry.blocks.push_back(block.get());
  latest.push_back(block->record);
  if (int64_t(latest.size()) > engine.settings.keep_last) latest.pop_front();
  return block;
}

// ---- Moving

std::vector<std::shared_ptr<Transfer>> Tracker::send(Block& block, const c10::Storage& source, const Ranges& runs,
                                                     at::ScalarType dtype, Codec codec, const EventPtr& ready,
                                                     double density, double share) {
  EventPtr begin = engine.mover->asynchronous() ? nullptr : engine.mover->record(residency.device);
  auto transfers = start(block, source, runs, dtype, codec, ready, density, share);
  if (transfers.empty()) return {};
  if (begin != nullptr) stall(std::move(begin), engine.mover->record(residency.device), "copy out");
  for (auto& transfer : transfers) span(true, *transfer);
  return transfers;
}

std::vector<std::shared_ptr<Transfer>> Tracker::start(Block& block, const c10::Storage& source, const Ranges& runs,
                                                      at::ScalarType dtype, Codec codec, const EventPtr& ready,
                                                      double density, double share) {
  std::vector<std::shared_ptr<Transfer>> transfers;
  const int64_t allocations = engine.mover->host_allocations();
  for (const Range& run : runs) {
    const Bytes bytes{source, run.lo, run.hi, dtype};
    std::shared_ptr<Transfer> transfer;
    try {
      if (codec != Codec::none && compressible(bytes)) {
        const int64_t itemsize = int64_t(c10::elementSize(dtype));
        const int64_t coded = compressed_elements(run.size() / itemsize, share) * itemsize;
        block.staging = std::max(block.staging, engine.mover->staging(coded, itemsize, density));
        reserve(block.staging);
      }
      transfer = engine.mover->out(bytes, codec, ready, density, share);
    } catch (const c10::OutOfMemoryError&) {
      if (codec == Codec::none) throw;
      codec = Codec::none;  // needs no device memory
      transfer = engine.mover->out(bytes, codec, ready, density, share);
    } catch (const NoHostMemory&) {  // not even for the codec's counts
    }
    use.slow |= engine.mover->host_allocations() != allocations;
    if (transfer == nullptr) {
      engine.pool_failed = true;
      return {};
    }
    transfers.push_back(std::move(transfer));
  }
  return transfers;
}

void Tracker::leave(Block& block, c10::Storage source, std::vector<std::shared_ptr<Transfer>> transfers,
                    int64_t bytes) {
  auto outgoing = std::make_shared<Outgoing>(std::move(source), transfers, bytes);
  block.outgoing = outgoing;
  residency.leaving += bytes;
  residency.outs.push_back(std::move(outgoing));
  block.transfers.insert(block.transfers.end(), transfers.begin(), transfers.end());
}

bool Tracker::may_move(Block& block) {
  block.eligible = false;
  if (!block.resized(*block.source.unsafeGetStorageImpl())) return true;
  totals.kept[block.record->reason] -= block.record->bytes, totals.kept[kOther] += block.record->bytes;
  block.record->reason = kOther;
  return false;
}

bool Tracker::move(Block& block, double share, double density) {
  if (!may_move(block)) return false;
  const EventPtr ready = complete(block);
  if (ready == nullptr) return false;
  // Other streams that saved it may still be reading it.
  const c10::Stream current = engine.mover->stream(residency.device);
  for (const c10::Stream stream : block.streams)
    if (stream != current) engine.mover->used_on(block.source, stream);
  // An explicitly chosen codec compresses whole tensors.
  if (engine.settings.codec != Codec::automatic) share = 1;
  moved(block, send(block, block.source, block.runs, block.dtype, codec(share > 0), ready, density, share));
  if (block.moved && !engine.mover->asynchronous()) residency.poll();
  return block.moved;
}

void Tracker::moved(Block& block, std::vector<std::shared_ptr<Transfer>> transfers) {
  Record& record = *block.record;
  if (transfers.empty()) {
    totals.kept[record.reason] -= record.bytes, totals.kept[kPool] += record.bytes;
    record.reason = kPool;
    return;
  }
  block.moved = record.moved = true;
  totals.kept[record.reason] -= record.bytes;
  totals.moved_bytes += record.bytes, totals.moved_tensors += record.tensors;
  record.compressed = std::ranges::any_of(transfers, [](auto& p) { return p->compressed; });
  if (record.compressed) totals.compressed_tensors += record.tensors;
  if (std::ranges::all_of(transfers, [](auto& p) { return !p->sent.parts.empty(); })) {
    record.counts.clear();
    for (auto& p : transfers)
      for (const auto& part : p->sent.parts) record.counts.push_back(part.count);
  }
  leave(block, std::move(block.source), std::move(transfers), block.bytes);
  block.source = {};
  moved_.push_back(block.weak_from_this());
}

bool Tracker::joins(const Block& block, size_t count, int64_t bytes) const {
  return engine.mover->joins() && block.runs.size() == 1 && count < kMostJoint &&
         bytes + block.hull.size() < kJointBytes;
}

void Tracker::postpone(const std::shared_ptr<Block>& block, double density) {
  postponed_on_ = block->streams.front();
  postponed_.push_back({block, density});
  postponed_bytes_ += block->hull.size();
}

void Tracker::move_postponed(EventPtr ready) {
  if (postponed_.empty() || capturing()) return;
  const auto postponed = std::exchange(postponed_, {});
  postponed_bytes_ = 0;
  // The bytes of a block may have got more since, or have been needed.
  std::vector<std::pair<std::shared_ptr<Block>, double>> joint;
  for (const auto& [weak, density] : postponed) {
    auto block = weak.lock();
    if (block == nullptr || block->into != nullptr || !block->eligible || block->moved || block->read) continue;
    if (block->runs.size() == 1 && block->streams.size() == 1 && block->streams.front() == postponed_on_)
      joint.emplace_back(std::move(block), density);
    else
      move(*block, 0, density);
  }
  if (joint.empty()) return;
  if (ready == nullptr) ready = engine.mover->record_on(postponed_on_);
  if (ready == nullptr) return;
  std::vector<std::vector<std::shared_ptr<Transfer>>> transfers(joint.size());
  const bool elsewhere = engine.mover->stream(residency.device) != postponed_on_;
  engine.mover->begin_joint();
  try {
    for (size_t i = 0; i < joint.size(); ++i) {
      Block& b = *joint[i].first;
      if (!may_move(b)) continue;
      if (elsewhere) engine.mover->used_on(b.source, postponed_on_);  // as in move
      transfers[i] = start(b, b.source, b.runs, b.dtype, Codec::none, ready, joint[i].second, 0);
    }
  } catch (...) {
    engine.mover->end_joint();
    throw;
  }
  engine.mover->end_joint();
  span_joint(true, transfers);
  for (size_t i = 0; i < joint.size(); ++i)
    if (joint[i].first->record->reason != kOther) moved(*joint[i].first, std::move(transfers[i]));
}

// Makes `other` part of `block`; both have the same storage, counter and version.
bool Tracker::connect(Block& block, Block& other, Entry& entry) {
  if (block.record->uncounted != other.record->uncounted) return false;
  if (block.moved != other.moved) {
    Block& kept = block.moved ? other : block;
    if (kept.source && !move(kept)) return false;
  }
  if (!block.moved) completed_by(block, other.streams);
  block.staging = std::max(block.staging, other.staging);
  auto at = other.shared_from_this();
  block.runs.insert(block.runs.end(), other.runs.begin(), other.runs.end());
  block.transfers.insert(block.transfers.end(), other.transfers.begin(), other.transfers.end());
  block.seen.insert(block.seen.end(), other.seen.begin(), other.seen.end());
  block.hull = {std::min(block.hull.lo, other.hull.lo), std::max(block.hull.hi, other.hull.hi)};
  if (!other.outgoing.expired()) block.outgoing = other.outgoing;
  block.bytes += std::exchange(other.bytes, 0);
  block.unread += std::exchange(other.unread, 0);
  other.drop_held();
  no_longer_ahead(other);
  other.source = {};
  Record &into = *block.record, &from = *other.record;
  if (!block.moved) totals.kept[from.reason] -= from.bytes, totals.kept[into.reason] += from.bytes;
  into.bytes += std::exchange(from.bytes, 0);
  into.tensors += std::exchange(from.tensors, 0);
  entry.blocks.erase(std::ranges::find(entry.blocks, &other));
  other.into = block.shared_from_this();
  return true;
}

// Extends the block by a range that overlaps it. False if the block has moved and there is no host memory.
bool Tracker::extend(Block& block, const at::Tensor& x, Range range, int64_t bytes) {
  Ranges missing{range};
  for (const Range& run : block.runs) subtract(missing, run);
  if (block.moved && !missing.empty()) {
    // Complete as of now: the block's first bytes may be older than these.
    auto transfers = send(block, x.storage(), missing, x.scalar_type(), codec(block.record->compressed),
                          engine.mover->record(residency.device), 0, 1);
    if (transfers.empty()) return false;
    residency.count(bytes);
    leave(block, x.storage(), std::move(transfers), bytes);
    if (!engine.mover->asynchronous()) residency.poll();
  }
  if (!block.moved) completed_by(block, engine.mover->stream(residency.device));
  block.runs.insert(block.runs.end(), missing.begin(), missing.end());
  block.hull = {std::min(block.hull.lo, range.lo), std::max(block.hull.hi, range.hi)};
  return true;
}

void Tracker::completed_by(Block& block, c10::ArrayRef<c10::Stream> streams) {
  block.saved = nullptr;
  for (const c10::Stream stream : streams)
    if (std::ranges::find(block.streams, stream) == block.streams.end()) block.streams.push_back(stream);
}

EventPtr Tracker::complete(const Block& block) {
  if (block.saved != nullptr) return block.saved;
  EventPtr all;
  for (const c10::Stream stream : block.streams) {
    EventPtr one = engine.mover->record_on(stream);
    if (one == nullptr) return nullptr;
    all = all == nullptr ? std::move(one) : std::make_shared<EventPair>(std::move(all), std::move(one));
  }
  return all;
}

void Tracker::evict() {
  const auto over = [&] { return residency.counted - residency.leaving - postponed_bytes_ > *engine.settings.budget; };
  if (!engine.settings.budget || !over() || capturing()) return;
  while (over() && !evictable_.empty()) {
    auto block = evictable_.front().lock();
    if (block != nullptr && block->into == nullptr && block->eligible && !block->moved && !block->read) {
      if (block->record->number >= numbers - engine.settings.keep_last) return;
      move(*block);
    }
    evictable_.pop_front();
  }
}

EventPtr Tracker::make_room(int64_t next, EventPtr now) {
  int64_t limit = std::numeric_limits<int64_t>::max() / 2;
  if (plan_ != nullptr)
    limit = plan_->room;
  else if (engine.settings.budget)
    limit = *engine.settings.budget;
  return drop_until(limit - next, std::move(now));
}

EventPtr Tracker::drop_until(int64_t most, EventPtr now) {
  size_t count = 0;
  for (int64_t left = residency.counted; count < residency.outs.size() && left > most; ++count)
    left -= residency.outs[count]->bytes;
  EventPtr end;
  // The last first: waiting for it covers those before it.
  for (size_t i = count; i-- > 0;) {
    auto& transfers = residency.outs[i]->transfers;
    for (size_t j = transfers.size(); j-- > 0;) {
      if (transfers[j]->is_out(false)) continue;
      if (now == nullptr) now = engine.mover->record(residency.device);
      if (end == nullptr) end = std::make_shared<EventPair>(now, transfers[j]->out_end);
      transfers[j]->wait_out();
    }
  }
  for (; count > 0; --count) residency.pop();
  if (end != nullptr) stall(std::move(now), end, "room");
  return end;
}

// The end of the `with` block: compute waits for copies out, which frees their sources.
void Tracker::exit() {
  capturing_.reset();
  if (capturing()) return;
  move_postponed(nullptr);
  if (unhooked_ != nullptr && forward == 0) leave_forward(true);
  residency.poll();
  drop_until(-1, nullptr);
}

// ---- Without hooks

void Tracker::unhook() {
  unhooked_ = plan_;
  move_postponed(nullptr);
  latest.clear();  // the last ones are among those without hooks
  unhooked_bytes_ = plan_->unhooked_bytes;
  totals.unhooked_tensors = int64_t(plan_->tensors.size()) - saves;
  totals.saved_tensors += totals.unhooked_tensors, totals.saved_bytes += unhooked_bytes_;
  totals.kept[kBudget] += unhooked_bytes_;
  residency.want(unhooked_bytes_);
  residency.count(unhooked_bytes_);
}

// The operations of the tensors without hooks have no events.
void Tracker::leave_forward(bool important) {
  const size_t tensors = unhooked_->tensors.size();
  events.resize(tensors + 1), curve.resize(tensors + 1, residency.counted);
  forward = int64_t(tensors) + 1;
  boundary(important);
}

void Tracker::resume() {
  resumed_ = true;
  if (forward == 0) leave_forward(!capturing());
  reads = unhooked_->unhooked_reads;
  const size_t known = size_t(forward + reads);
  if (events.size() < known) events.resize(known), curve.resize(known, residency.counted);
  forget_unhooked();
}

void Tracker::forget_unhooked() {
  residency.want(-unhooked_bytes_);
  residency.count(-std::exchange(unhooked_bytes_, 0));
}

}  // namespace weft::offload
