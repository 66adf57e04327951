// Tensors that come back from the host: when they are read, and ahead of that.
#include <algorithm>

#include "offload/tracker/tracker.h"

namespace weft::offload {

EventPtr Tracker::record_read(Block& block, Packed& packed) {
  if (packed.read) return nullptr;
  EventPtr event;
  const bool first = unhooked_ != nullptr ? !resumed_ : forward == 0;
  if (first && unhooked_ != nullptr) {
    resume();
  } else if (first) {
    forward = saves + 1;
    if (plan_ != nullptr && plan_->tensors.size() != size_t(saves)) plan_ = nullptr;
  }
  no_longer_ahead(block);
  if (!std::exchange(block.read, true) && block.record->in_timeline) {
    block.record->first_read = forward + reads++;
    const bool important = first || ((block.moved || block.eligible) && use.times(reads));
    event = boundary(important && !capturing());
  }
  if (block.record->in_timeline) block.record->last_read = operation();
  move_postponed(nullptr);
  return event;
}

// The storage to read `packed` from, and the shift of its bytes there.
c10::Storage Tracker::read(Block& block, Packed& packed, int64_t* offset) {
  look(/*read=*/true);
  if (block.moved && capturing())
    throw std::runtime_error(
        "offload: a saved tensor that was moved to the host cannot come back while its stream is captured into a CUDA "
        "graph; capture the forward that saves it, too, or run this backward outside of the capture");
  EventPtr now = record_read(block, packed);
  c10::Storage storage;
  *offset = 0;
  if (block.source) {
    storage = block.source;
  } else if (storage = refilled(block)) {
  } else if (auto outgoing = block.outgoing.lock();
             outgoing && !block.resized(*outgoing->source.unsafeGetStorageImpl())) {
    storage = outgoing->source;  // still here
  } else {
    if (auto alive = block.restored.lock(); alive && block.restored_hull.contains(packed.range)) {
      storage = c10::Storage(std::move(alive));
    } else {
      if (now == nullptr && engine.mover->asynchronous()) now = engine.mover->record(residency.device);
      storage = bring(block, now, true);
    }
    // Every reader waits: earlier readers may have been on other streams.
    const bool first = std::exchange(block.arriving, false) && engine.mover->asynchronous() &&
                       !std::ranges::all_of(block.transfers, [](auto& transfer) { return transfer->arrived(); });
    if (first && now == nullptr) now = engine.mover->record(residency.device);
    for (auto& transfer : block.transfers) transfer->wait_in(storage);
    if (first) {
      EventPtr end = now;
      for (auto& transfer : block.transfers)
        if (transfer->here != nullptr) end = std::make_shared<EventPair>(std::move(end), transfer->here);
      stall(now, std::move(end), "copy back");
    }
    *offset = block.restored_offset;
  }
  if (!std::exchange(packed.read, true) && --block.unread == 0) block.drop_held();
  prefetch(block.moved ? block.hull.size() : 0, now);
  return storage;
}

// The storage of a moved block if it is alive and has other memory now: torch would read what it holds.
c10::Storage Tracker::refilled(const Block& block) const {
  const auto entry = entries_.find(block.key);
  if (entry == entries_.end()) return {};
  auto storage = entry->second.storage.lock();
  if (!storage || !block.resized(*storage) || int64_t(storage->nbytes()) < block.hull.hi) return {};
  return c10::Storage(std::move(storage));
}

void Tracker::read_kept(Block& block, Packed& packed) {
  look(/*read=*/true);
  EventPtr now = record_read(block, packed);
  prefetch(0, now);
}

c10::Storage Tracker::bring(Block& block, EventPtr& now, bool needed) {
  residency.sweep();
  reserve(block.staging);
  // The allocation may reuse memory that has just left: `now` must be behind the waits for that.
  if (needed && !capturing())
    if (EventPtr later = make_room(block.hull.size(), now)) now = std::move(later);
  EventPtr begin = engine.mover->asynchronous() ? nullptr : engine.mover->record(residency.device);
  c10::Storage storage = start_bring(block, now);
  if (begin != nullptr) stall(std::move(begin), engine.mover->record(residency.device), "copy back");
  for (size_t i = 0; i < block.runs.size(); ++i) span(false, *block.transfers[i]);
  brought(block, storage);
  return storage;
}

void Tracker::brought(Block& block, const c10::Storage& storage) {
  block.arriving = true;
  if (block.unread > 0) block.held = storage;
  if (!block.read && block.ahead == 0) ahead_bytes_ += block.ahead = block.hull.size();
}

void Tracker::no_longer_ahead(Block& block) {
  ahead_bytes_ -= std::exchange(block.ahead, 0);
}

c10::Storage Tracker::start_bring(Block& block, const EventPtr& now) {
  const int64_t bytes = block.hull.size(), wanted = int64_t((block.address + uintptr_t(block.hull.lo)) % 256);
  const auto position = [](const c10::Storage& s) { return int64_t(reinterpret_cast<uintptr_t>(s.data()) % 256); };
  c10::Storage storage = block.transfers.front()->home();
  block.restored_hull = block.hull;
  block.restored_offset = 0;
  if (!storage) {
    storage = engine.mover->allocate(residency.device, bytes + wanted);
    if (position(storage) != 0) storage = engine.mover->allocate(residency.device, bytes + 255);
    block.restored_offset = ((wanted - position(storage)) & 255) - block.hull.lo;
  }
  block.restored = c10::weak_intrusive_ptr<c10::StorageImpl>(storage.getWeakStorageImpl());
  residency.count(bytes);
  residency.restored.emplace_back(block.restored, bytes);
  size_t started = 0;
  try {
    for (; started < block.runs.size(); ++started) {
      const Range& run = block.runs[started];
      block.transfers[started]->start_in(
          {storage, run.lo + block.restored_offset, run.hi + block.restored_offset, block.dtype}, now);
    }
  } catch (...) {  // copies are on their way to memory that is about to be freed
    for (size_t i = 0; i < started; ++i) block.transfers[i]->wait_in(storage);
    throw;
  }
  return storage;
}

void Tracker::bring_joint(std::vector<std::shared_ptr<Block>>& blocks, EventPtr& now) {
  const auto coming = std::exchange(blocks, {});
  if (coming.empty()) return;
  if (coming.size() == 1) return void(bring(*coming.front(), now, false));
  residency.sweep();
  if (now == nullptr) now = engine.mover->record(residency.device);
  std::vector<c10::Storage> storages;
  std::vector<std::vector<std::shared_ptr<Transfer>>> transfers;
  const auto end = [&] {
    engine.mover->end_joint();
    span_joint(false, transfers);
    for (size_t i = 0; i < storages.size(); ++i) brought(*coming[i], storages[i]);
  };
  engine.mover->begin_joint();
  try {
    for (const auto& block : coming) {
      storages.push_back(start_bring(*block, now));
      transfers.push_back(block->transfers);
    }
  } catch (...) {
    end();
    throw;
  }
  end();
}

void Tracker::prefetch(int64_t current, EventPtr& now) {
  const bool any = plan_ != nullptr ? next_back_ < plan_->back.size() : !moved_.empty();
  if (!any || !engine.mover->asynchronous() || capturing()) return;
  try {
    prefetch_some(current, now);
  } catch (const c10::OutOfMemoryError&) {  // not needed yet: the read brings it back
  }
}

void Tracker::prefetch_some(int64_t current, EventPtr& now) {
  const auto wanted = [](const std::shared_ptr<Block>& b) { return b && b->moved && !b->read && !b->held; };
  if (plan_ != nullptr) {
    // Small ones come with one that is due.
    std::vector<std::shared_ptr<Block>> joint;
    int64_t bytes = 0;
    for (size_t i = next_back_; i < plan_->back.size(); ++i) {
      const auto [tensor, from] = plan_->back[i];
      auto block = planned_blocks_[size_t(tensor)].lock();
      if (block != nullptr) block = root(block);
      if (wanted(block)) {
        const int64_t size = block->hull.size();
        const bool small = joins(*block, 0, 0) && !block->record->compressed && block->transfers.size() == 1;
        const bool with = small && !joint.empty() && joins(*block, joint.size(), bytes);
        if (!block->outgoing.expired() || (from > operation() && !with)) break;
        if (residency.counted + bytes + size > plan_->room) residency.sweep();
        if (residency.counted + bytes + size > plan_->room) {
          // Enough is there for now, and more will fit later.
          if (with && ahead_bytes_ >= kJointBytes / 2) joint.clear();
          break;
        }
        if (!with) bring_joint(joint, now), next_back_ = i, bytes = 0;
        if (small)
          joint.push_back(std::move(block)), bytes += size;
        else
          bring(*block, now, false);
      }
      if (joint.empty()) next_back_ = i + 1;
    }
    bring_joint(joint, now);
    return;
  }
  // Without a plan: in reverse order of the saves, as far as there is room, and at least one tensor ahead.
  while (!moved_.empty()) {
    auto block = moved_.back().lock();
    if (block != nullptr) block = root(block);
    if (wanted(block)) {
      if (!block->outgoing.expired()) return;
      const int64_t bytes = block->hull.size();
      residency.sweep();
      if (residency.counted + bytes > std::max(engine.settings.budget.value_or(0), current + bytes)) return;
      bring(*block, now, false);
    }
    moved_.pop_back();
  }
}

}  // namespace weft::offload
