// Host memory for moved tensors: buffers of exactly the bytes asked for, kept for reuse, never more than a limit.
// Torch-free. Not thread-safe: its callers hold Python's lock.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

namespace weft::offload {

// The system's allocator; neither function throws. `busy` is what a buffer's last user left: free waits for it.
struct HostMemory {
  std::function<void*(int64_t bytes)> allocate;  // null on failure
  std::function<void(void* data, const std::shared_ptr<void>& busy)> free;
};

class HostPool : public std::enable_shared_from_this<HostPool> {
 public:
  class Buffer {
   public:
    Buffer(std::shared_ptr<HostPool> pool, void* data, int64_t bytes)
        : pool_(std::move(pool)), data_(data), bytes_(bytes) {}
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { pool_->put(*this); }
    void* data() const { return data_; }
    int64_t bytes() const { return bytes_; }
    // What the next owner of the memory must wait for before it writes, e.g. the copy that still reads it.
    std::shared_ptr<void> busy;
    // Whether the pool keeps the memory for the next request of this size.
    bool reusable = true;

   private:
    std::shared_ptr<HostPool> pool_;
    void* data_;
    int64_t bytes_;
    friend class HostPool;
  };

  HostPool(HostMemory memory, int64_t limit) : memory_(std::move(memory)), limit_(limit) {}
  HostPool(const HostPool&) = delete;
  HostPool& operator=(const HostPool&) = delete;
  ~HostPool() { release(); }

  // Null where the limit or the system refuses, even after all free buffers were released.
  std::unique_ptr<Buffer> take(int64_t bytes) {
    auto& stack = free_[bytes];
    if (!stack.empty()) {
      auto buffer = std::make_unique<Buffer>(shared_from_this(), stack.back().data, bytes);
      buffer->busy = std::move(stack.back().busy);
      stack.pop_back();
      free_bytes_ -= bytes;
      return buffer;
    }
    if (bytes > limit_ - (held_ - free_bytes_)) return nullptr;
    if (bytes > limit_ - held_) release();
    void* data = memory_.allocate(bytes);
    if (data == nullptr && free_bytes_ > 0) {
      release();
      data = memory_.allocate(bytes);
    }
    if (data == nullptr) return nullptr;
    ++allocations_;
    hold(bytes);
    return std::make_unique<Buffer>(shared_from_this(), data, bytes);
  }

  // Those of `sizes` that the pool has no buffers for, in use or free, as far as the limit allows.
  std::vector<int64_t> missing(const std::vector<int64_t>& sizes) const {
    auto there = count_;
    std::vector<int64_t> found;
    int64_t held = held_;
    for (const int64_t bytes : sizes) {
      if (there[bytes]-- > 0) continue;
      if (bytes > limit_ - held) break;
      found.push_back(bytes), held += bytes;
    }
    return found;
  }

  // Takes in memory that somebody else has allocated for it, as its own allocator would.
  void add(void* data, int64_t bytes) {
    if (closed_ || bytes > limit_ - held_) return memory_.free(data, nullptr);
    hold(bytes);
    free_[bytes].push_back({data, nullptr});
    free_bytes_ += bytes;
  }

  // Returns the free buffers to the system, and their total bytes to the caller.
  int64_t release() {
    const int64_t bytes = free_bytes_;
    for (auto& [size, stack] : free_)
      for (auto& entry : stack) memory_.free(entry.data, entry.busy), --count_[size];
    free_.clear();
    held_ -= bytes;
    free_bytes_ = 0;
    return bytes;
  }

  // From now on a buffer returns to the system when its user drops it.
  void close() {
    closed_ = true;
    release();
  }

  int64_t held() const { return held_; }
  int64_t peak() const { return peak_; }
  // Number of allocations from the system.
  int64_t allocations() const { return allocations_; }

 private:
  void hold(int64_t bytes) {
    held_ += bytes, ++count_[bytes];
    peak_ = std::max(peak_, held_);
  }
  void put(Buffer& buffer) {
    if (closed_ || !buffer.reusable) {
      memory_.free(buffer.data_, buffer.busy);
      held_ -= buffer.bytes_, --count_[buffer.bytes_];
      return;
    }
    free_[buffer.bytes_].push_back({buffer.data_, std::move(buffer.busy)});
    free_bytes_ += buffer.bytes_;
  }

  struct Free {
    void* data;
    std::shared_ptr<void> busy;
  };
  HostMemory memory_;
  int64_t limit_, held_ = 0, free_bytes_ = 0, peak_ = 0, allocations_ = 0;
  std::unordered_map<int64_t, std::vector<Free>> free_;
  std::unordered_map<int64_t, int64_t> count_;  // buffers of each size, in use or free
  bool closed_ = false;
};

}  // namespace weft::offload
