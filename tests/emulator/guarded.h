#pragma once
#include <sys/mman.h>

#include "emulator.h"

// Memory that ends, or begins, where a page without access does.
class Guarded {
 public:
  Guarded(size_t bytes, bool at_end) {
    constexpr size_t kPage = 4096;
    const size_t inner = (bytes + kPage - 1) / kPage * kPage;
    size_ = inner + 2 * kPage;
    all_ = static_cast<unsigned char*>(mmap(nullptr, size_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (all_ == MAP_FAILED || (inner && mprotect(all_ + kPage, inner, PROT_READ | PROT_WRITE) != 0))
      emulator::fail("no memory");
    std::memset(all_ + kPage, 0xa5, inner);
    data_ = all_ + kPage + (at_end ? inner - bytes : 0);
  }
  ~Guarded() { munmap(all_, size_); }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  unsigned char *all_, *data_;
  size_t size_;
};
