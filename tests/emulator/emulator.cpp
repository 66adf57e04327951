// The scheduler of emulator.h.
#include "emulator.h"

namespace emulator {

void fail(const char* why) {
  std::fprintf(stderr, "emulator: %s\n", why);
  std::abort();
}

void leave() {
  switch_context(current->context, scheduler);
}
void yield() {
  runnable.push_back(current);
  leave();
}
void poll() {
  polling.push_back(current);
  leave();
}
void meet(Meeting& m) {
  if (++m.arrived < m.expected) {
    m.waiting.push_back(current);
    return leave();
  }
  m.arrived = 0;
  runnable.insert(runnable.end(), m.waiting.begin(), m.waiting.end());
  m.waiting.clear();
  yield();
}

Brought gather(const uint32_t* mine, int count) {
  Warp& warp = *current->warp;
  const int turn = warp.turn[current->lane]++ & 1;
  std::copy_n(mine, count, warp.brought[turn][current->lane]);
  meet(warp.meeting);
  return warp.brought[turn];
}

void launch(void (*kernel)(), int blocks, int threads, int cluster, size_t shared_bytes, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::unique_ptr<Block>> all_blocks;
  std::vector<std::unique_ptr<Cluster>> clusters;
  std::vector<std::unique_ptr<Fiber>> fibers;
  constexpr size_t kStack = (96 << 10) + 704;
  const std::unique_ptr<char[]> stacks(new char[kStack * blocks * threads]);  // not touched where it is not used
  static void (*entered)();
  entered = kernel;
  const auto enter = +[] {
    entered();
    current->done = true;
    --current->block->running;
    leave();
  };
  for (int b = 0; b < blocks; ++b) {
    if (b % cluster == 0) clusters.emplace_back(std::make_unique<Cluster>())->meeting.expected = cluster * threads;
    Block& block = *all_blocks.emplace_back(std::make_unique<Block>());
    block.cluster = clusters.back().get();
    block.cluster->blocks.push_back(&block);
    block.storage.assign(shared_bytes + 128, 0xcd);
    block.shared =
        reinterpret_cast<unsigned char*>((reinterpret_cast<uintptr_t>(block.storage.data()) + 127) / 128 * 128);
    block.shared_bytes = shared_bytes;
    block.meeting.expected = block.running = threads;
    block.speed = std::pow(10.0, -2.0 * (random() % 1000) / 1000);
    for (int t = 0; t < threads; ++t) {
      if (t % 32 == 0) block.warps.emplace_back(std::make_unique<Warp>())->meeting.expected = 32;
      Fiber& fiber = *fibers.emplace_back(std::make_unique<Fiber>());
      fiber.thread.x = t, fiber.block_index.x = b, fiber.lane = t % 32;
      fiber.block = &block, fiber.warp = block.warps.back().get();
      begin_context(fiber.context, stacks.get() + kStack * (size_t(b) * threads + t), kStack, enter);
      runnable.push_back(&fiber);
    }
  }
  const auto deliver = [&] {
    std::swap(messages[random() % messages.size()], messages.back());
    const auto message = std::move(messages.back());
    messages.pop_back();
    message();
  };
  for (size_t done = 0; done < fibers.size();) {
    while (!messages.empty() && ((runnable.empty() && polling.empty()) || random() % 64 == 0)) deliver();
    if (!polling.empty() && (runnable.empty() || random() % 8 == 0)) {
      std::swap(polling[random() % polling.size()], polling.back());
      runnable.push_back(polling.back());
      polling.pop_back();
    }
    if (runnable.empty()) fail("deadlock");
    const auto pick = [&] { return random() % runnable.size(); };
    size_t next = pick();
    for (int i = 0; i < 3 && random() % 1000 > 1000 * runnable[next]->block->speed; ++i) next = pick();
    std::swap(runnable[next], runnable.back());
    current = runnable.back();
    runnable.pop_back();
    switch_context(scheduler, current->context);
    done += current->done;
  }
  while (!messages.empty()) deliver();
}

}  // namespace emulator
