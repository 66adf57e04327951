#include "offload/ledger.h"

#include <algorithm>
#include <limits>

#include "offload/policy.h"

namespace weft::offload {
namespace {

// Takes `taken` out of `ranges`.
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
  while (!outs.empty() && std::ranges::all_of(outs.front()->parcels, [](auto& p) { return p->is_out(true); })) pop();
  sweep();
}

void Account::sweep() {
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
      if (!moved) ledger.account.count(-bytes);
      ledger.account.want(-bytes);
    }
    ledger.forget(*this);
  } catch (...) {  // the device is gone
  }
}

void Block::drop_held() {
  // On its way back, and nobody waited for it: its memory must not be given out before. Where it has arrived nothing is
  // told to wait, for the stream may be captured.
  if (std::exchange(arriving, false) && held)
    for (auto& parcel : parcels)
      if (parcel->here == nullptr || !parcel->here->passed()) parcel->wait_in(held);
  held = {};
}

// ---- Ledger

Ledger::Ledger(Engine& engine, Use& use, Account& account, std::shared_ptr<const Schedule> schedule)
    : engine(engine), use(use), account(account), schedule_(std::move(schedule)) {
  account.open.push_back(this);
  if (schedule_ != nullptr) planned_blocks_.resize(schedule_->tensors.size());
  boundary(!engine.mover->capturing(account.device));
}

Ledger::~Ledger() {
  try {
    finish();
  } catch (...) {  // the device is gone
  }
}

bool Ledger::look() {
  capturing_ = engine.mover->capturing(account.device);
  capturing_ ? account.sweep() : account.poll();
  return capturing_;
}

void Ledger::finish() {
  std::erase(account.open, this);
  give_back();
}

void Ledger::give_back() {
  if (!account.open.empty() || account.staging == 0) return;
  account.count(-std::exchange(account.staging, 0));
  engine.mover->settle(account.device);
}

void Ledger::reserve(int64_t staging) {
  if (staging > account.staging) account.count(staging - std::exchange(account.staging, staging));
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
  auto& blocks = it->second.blocks;
  if (const auto at = std::ranges::find(blocks, &block); at != blocks.end()) blocks.erase(at);
  if (blocks.empty() && it->second.parameters.empty()) entries_.erase(it);
}

Codec Ledger::codec(bool compressed) const {
  if (engine.settings.codec != Codec::automatic) return engine.settings.codec;
  if (!engine.mover->asynchronous()) return Codec::automatic;  // which looks before it sends
  return compressed ? Codec::zvc : Codec::none;
}

std::shared_ptr<Block> Ledger::save(const at::Tensor& x, Range range, const Witness& witness, bool may_move,
                                    bool uncounted) {
  auto* key = x.storage().unsafeGetStorageImpl();
  Entry& entry =
      entries_
          .try_emplace(key, Entry{c10::weak_intrusive_ptr<c10::StorageImpl>(x.storage().getWeakStorageImpl()), {}, {}})
          .first->second;
  std::shared_ptr<Block> block;
  for (size_t i = 0; i < entry.blocks.size(); ++i) {
    Block* other = entry.blocks[i];
    if (other->resized(*key) || !other->witness.same(witness)) continue;
    if (std::ranges::find(other->seen, range) != other->seen.end()) return other->shared_from_this();
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
  if (!may_move) reason = account.device.is_cpu() && !engine.mover->moves(account.device) ? kHost : kOther;
  const bool created = block == nullptr || !extend(*block, x, range, bytes);
  if (created) block = create(x, range, witness, entry, reason, uncounted);
  Block& b = *block;
  Record& record = *b.record;
  b.seen.push_back(range);
  record.bytes += bytes, record.tensors += 1;
  totals.saved_bytes += bytes, totals.saved_tensors += 1;
  (b.moved ? totals.moved_bytes : totals.kept[record.reason]) += bytes;
  if (b.moved) totals.moved_tensors += 1;
  b.bytes += bytes;
  if (!record.uncounted) {
    account.want(bytes);
    if (!b.moved) account.count(bytes);
  }

  if (!b.moved && record.reason == kSmall && b.hull.size() >= engine.settings.min_bytes) {
    totals.kept[kSmall] -= record.bytes, totals.kept[kBudget] += record.bytes;
    record.reason = kBudget;
    b.eligible = true;
    evictable_.push_back(block);
  }
  if (created) admit(block, record.first_bytes);
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
  if (schedule_ == nullptr && forward == 0 && b.eligible && use.counts && engine.settings.codec == Codec::automatic) {
    const Bytes bytes{b.source, b.hull.lo, b.hull.hi, b.dtype};
    try {
      if (compressible(bytes)) record.counts = {engine.mover->count(bytes)};
    } catch (const NoHostMemory&) {  // then nobody knows
    } catch (const c10::OutOfMemoryError&) {
    }
  }
  if (expected != nullptr) planned_blocks_[size_t(record.number)] = block;
  if (moves) move(b, expected->share, expected->density);
  if (b.eligible) evictable_.push_back(block);
  const int64_t previous = std::exchange(previous_bytes_, bytes);
  if (account.outs.empty() || capturing_) return;
  if (schedule_ != nullptr && forward == 0) {
    const size_t next = size_t(record.number) + 1;
    make_room(next < schedule_->tensors.size() ? schedule_->tensors[next].bytes : 0, b.saved);
  } else if (engine.settings.budget) {
    // What the operations that run need stays: the tensor just saved and the one before it.
    make_room(std::min<int64_t>(0, *engine.settings.budget - bytes - previous), nullptr);
  }
}

std::shared_ptr<Block> Ledger::create(const at::Tensor& x, Range range, const Witness& witness, Entry& entry,
                                      Reason reason, bool uncounted) {
  auto block = std::make_shared<Block>(use.shared_from_this(), *this, witness, engine.mover->stream(account.device));
  block->key = x.storage().unsafeGetStorageImpl();
  block->source = x.storage();
  block->dtype = x.scalar_type();
  block->address = reinterpret_cast<uintptr_t>(x.storage().data());
  block->hull = range;
  block->runs = {range};
  if (reason == kBudget && range.size() < engine.settings.min_bytes) reason = kSmall;
  block->eligible = reason == kBudget;
  block->record = std::make_shared<Record>(Record{.number = numbers++,
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

std::vector<std::shared_ptr<Parcel>> Ledger::send(Block& block, const c10::Storage& source, const Ranges& runs,
                                                  at::ScalarType dtype, Codec codec, const MarkPtr& ready,
                                                  double density, double share) {
  std::vector<std::shared_ptr<Parcel>> parcels;
  const int64_t allocations = engine.mover->host_allocations();
  MarkPtr begin = engine.mover->asynchronous() ? nullptr : engine.mover->mark(account.device);
  for (const Range& run : runs) {
    const Bytes bytes{source, run.lo, run.hi, dtype};
    std::shared_ptr<Parcel> parcel;
    try {
      if (codec != Codec::none && compressible(bytes)) {
        const int64_t itemsize = int64_t(c10::elementSize(dtype));
        const int64_t coded = compressed_elements(run.size() / itemsize, share) * itemsize;
        block.staging = std::max(block.staging, engine.mover->staging(coded, itemsize, density));
        reserve(block.staging);
      }
      parcel = engine.mover->out(bytes, codec, ready, density, share);
    } catch (const c10::OutOfMemoryError&) {
      if (codec == Codec::none) throw;
      codec = Codec::none;  // which needs no memory on the device
      parcel = engine.mover->out(bytes, codec, ready, density, share);
    } catch (const NoHostMemory&) {  // not even for what the codec counts
    }
    use.slow |= engine.mover->host_allocations() != allocations;
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

bool Ledger::move(Block& block, double share, double density) {
  if (block.resized(*block.source.unsafeGetStorageImpl())) {
    block.eligible = false;
    totals.kept[block.record->reason] -= block.record->bytes, totals.kept[kOther] += block.record->bytes;
    block.record->reason = kOther;
    return false;
  }
  Record& record = *block.record;
  block.eligible = false;
  const MarkPtr ready = complete(block);
  if (ready == nullptr) return false;
  // Who saved it on another stream may be reading it there still.
  const c10::Stream current = engine.mover->stream(account.device);
  for (const c10::Stream stream : block.streams)
    if (stream != current) engine.mover->used_on(block.source, stream);
  // A codec that was asked for takes whole tensors.
  if (engine.settings.codec != Codec::automatic) share = 1;
  auto parcels = send(block, block.source, block.runs, block.dtype, codec(share > 0), ready, density, share);
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
  if (block.record->uncounted != other.record->uncounted) return false;
  if (block.moved != other.moved) {
    Block& kept = block.moved ? other : block;
    if (kept.source && !move(kept)) return false;
  }
  if (!block.moved) completed_by(block, other.streams);
  block.staging = std::max(block.staging, other.staging);
  auto at = other.shared_from_this();
  block.runs.insert(block.runs.end(), other.runs.begin(), other.runs.end());
  block.parcels.insert(block.parcels.end(), other.parcels.begin(), other.parcels.end());
  block.seen.insert(block.seen.end(), other.seen.begin(), other.seen.end());
  block.hull = {std::min(block.hull.lo, other.hull.lo), std::max(block.hull.hi, other.hull.hi)};
  if (!other.outgoing.expired()) block.outgoing = other.outgoing;
  block.bytes += std::exchange(other.bytes, 0);
  block.unread += std::exchange(other.unread, 0);
  other.drop_held();
  other.source = {};
  Record &into = *block.record, &from = *other.record;
  if (!block.moved) totals.kept[from.reason] -= from.bytes, totals.kept[into.reason] += from.bytes;
  into.bytes += std::exchange(from.bytes, 0);
  into.tensors += std::exchange(from.tensors, 0);
  entry.blocks.erase(std::ranges::find(entry.blocks, &other));
  other.into = block.shared_from_this();
  return true;
}

// Takes a range that overlaps the block's into it. False without host memory where the block has moved already.
bool Ledger::extend(Block& block, const at::Tensor& x, Range range, int64_t bytes) {
  Ranges missing{range};
  for (const Range& run : block.runs) subtract(missing, run);
  if (block.moved && !missing.empty()) {
    // Complete as of now: what was saved first may be older than these bytes.
    auto parcels = send(block, x.storage(), missing, x.scalar_type(), codec(block.record->compressed),
                        engine.mover->mark(account.device), 0, 1);
    if (parcels.empty()) return false;
    account.count(bytes);
    leave(block, x.storage(), std::move(parcels), bytes);
    if (!engine.mover->asynchronous()) account.poll();
  }
  if (!block.moved) completed_by(block, engine.mover->stream(account.device));
  block.runs.insert(block.runs.end(), missing.begin(), missing.end());
  block.hull = {std::min(block.hull.lo, range.lo), std::max(block.hull.hi, range.hi)};
  return true;
}

void Ledger::completed_by(Block& block, c10::ArrayRef<c10::Stream> streams) {
  block.saved = nullptr;
  for (const c10::Stream stream : streams)
    if (std::ranges::find(block.streams, stream) == block.streams.end()) block.streams.push_back(stream);
}

MarkPtr Ledger::complete(const Block& block) {
  if (block.saved != nullptr) return block.saved;
  MarkPtr all;
  for (const c10::Stream stream : block.streams) {
    MarkPtr one = engine.mover->mark_on(stream);
    if (one == nullptr) return nullptr;
    all = all == nullptr ? std::move(one) : std::make_shared<Later>(std::move(all), std::move(one));
  }
  return all;
}

void Ledger::evict() {
  const auto over = [&] { return account.counted - account.leaving > *engine.settings.budget; };
  if (!engine.settings.budget || !over() || capturing_) return;
  while (over() && !evictable_.empty()) {
    auto block = evictable_.front().lock();
    if (block != nullptr && block->into == nullptr && block->eligible && !block->moved && !block->read) {
      if (block->record->number >= numbers - engine.settings.keep_last) return;
      move(*block);
    }
    evictable_.pop_front();
  }
}

MarkPtr Ledger::make_room(int64_t next, MarkPtr now) {
  int64_t limit = std::numeric_limits<int64_t>::max() / 2;
  if (schedule_ != nullptr)
    limit = schedule_->room;
  else if (engine.settings.budget)
    limit = *engine.settings.budget;
  return drop_until(limit - next, std::move(now));
}

MarkPtr Ledger::drop_until(int64_t most, MarkPtr now) {
  size_t count = 0;
  for (int64_t left = account.counted; count < account.outs.size() && left > most; ++count)
    left -= account.outs[count]->bytes;
  MarkPtr end;
  // The last first: a stream that waits for it waits for those before it, too.
  for (size_t i = count; i-- > 0;) {
    auto& parcels = account.outs[i]->parcels;
    for (size_t j = parcels.size(); j-- > 0;) {
      if (parcels[j]->is_out(false)) continue;
      if (now == nullptr) now = engine.mover->mark(account.device);
      if (end == nullptr) end = std::make_shared<Later>(now, parcels[j]->out_end);
      parcels[j]->wait_out();
    }
  }
  for (; count > 0; --count) account.pop();
  if (end != nullptr) stall(std::move(now), end, "room");
  return end;
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
    mark = boundary(important && !capturing_);
  }
  if (block.record->in_timeline) block.record->last_read = operation();
  return mark;
}

// The storage to read `packed` from, and what to add to its bytes' positions there.
c10::Storage Ledger::read(Block& block, Packed& packed, int64_t* offset) {
  if (look() && block.moved)
    throw std::runtime_error(
        "offload: a saved tensor that was moved to the host cannot come back while its stream is captured into a CUDA "
        "graph; capture the forward that saves it, too, or run this backward outside of the capture");
  MarkPtr now = mark_read(block, packed);
  c10::Storage storage;
  *offset = 0;
  if (block.source) {
    storage = block.source;
  } else if (storage = refilled(block)) {
  } else if (auto outgoing = block.outgoing.lock();
             outgoing && !block.resized(*outgoing->source.unsafeGetStorageImpl())) {
    storage = outgoing->source;  // still here
  } else {
    if (auto alive = block.restored.lock(); alive && block.restored_hull.contains(packed.range))
      storage = c10::Storage(std::move(alive));
    else
      storage = bring(block, now, true);
    // Every reader waits: the one before may have been on another stream.
    const bool first = std::exchange(block.arriving, false) && engine.mover->asynchronous();
    if (first && now == nullptr) now = engine.mover->mark(account.device);
    for (auto& parcel : block.parcels) parcel->wait_in(storage);
    if (first) {
      MarkPtr end = now;
      for (auto& parcel : block.parcels)
        if (parcel->here != nullptr) end = std::make_shared<Later>(std::move(end), parcel->here);
      stall(now, std::move(end), "copy back");
    }
    *offset = block.restored_offset;
  }
  if (!std::exchange(packed.read, true) && --block.unread == 0) block.drop_held();
  prefetch(block.moved ? block.hull.size() : 0, now);
  return storage;
}

// The storage of a moved block where it is alive and got other memory: what is in there is what torch would read.
c10::Storage Ledger::refilled(const Block& block) const {
  const auto entry = entries_.find(block.key);
  if (entry == entries_.end()) return {};
  auto storage = entry->second.storage.lock();
  if (!storage || !block.resized(*storage) || int64_t(storage->nbytes()) < block.hull.hi) return {};
  return c10::Storage(std::move(storage));
}

void Ledger::read_kept(Block& block, Packed& packed) {
  look();
  MarkPtr now = mark_read(block, packed);
  prefetch(0, now);
}

c10::Storage Ledger::bring(Block& block, MarkPtr& now, bool needed) {
  reserve(block.staging);
  const int64_t bytes = block.hull.size(), wanted = int64_t((block.address + uintptr_t(block.hull.lo)) % 256);
  const auto position = [](const c10::Storage& s) { return int64_t(reinterpret_cast<uintptr_t>(s.data()) % 256); };
  // What is allocated now may be memory that just left: `now` has to be behind what the stream waits for.
  if (needed && !capturing_)
    if (MarkPtr later = make_room(bytes, now)) now = std::move(later);
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
  if (!any || !engine.mover->asynchronous() || capturing_) return;
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
  drop_until(-1, nullptr);
}

}  // namespace weft::offload
