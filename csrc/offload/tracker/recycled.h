// An allocator for objects that come and go by the thousand in every step. It keeps the memory of those that are gone
// for the next ones: the system's takes longer for so many than the tracker for all else that it does with them.
// Not thread-safe: its callers hold Python's lock.
#pragma once
#include <cstddef>
#include <memory>
#include <new>
#include <vector>

namespace weft::offload {

template <typename T>
struct Recycled {
  using value_type = T;

  Recycled() = default;
  template <typename U>
  Recycled(const Recycled<U>&) {}

  T* allocate(size_t n) {
    auto& memory = kept();
    if (n != 1 || memory.empty()) return std::allocator<T>().allocate(n);
    T* const data = memory.back();
    memory.pop_back();
    return data;
  }
  void deallocate(T* data, size_t n) noexcept {
    auto& memory = kept();
    if (n == 1 && memory.size() < kMost)
      memory.push_back(data);
    else
      std::allocator<T>().deallocate(data, n);
  }
  template <typename U>
  bool operator==(const Recycled<U>&) const {
    return true;
  }

 private:
  static constexpr size_t kMost = 1 << 13;  // a step of a deep net saves a few thousand tensors

  static std::vector<T*>& kept() {
    static auto* const all = [] {
      auto* const made = new std::vector<T*>;
      made->reserve(kMost);
      return made;
    }();
    return *all;
  }
};

}  // namespace weft::offload
