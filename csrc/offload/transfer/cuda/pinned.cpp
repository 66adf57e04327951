// cudaHostAlloc touches page by page, which takes half a second per GiB and delays a first step. Large buffers are
// mapped here instead, in huge pages where the system has them, touched by several threads, and registered: in pieces,
// since nobody else gets to the driver meanwhile.
#include "offload/transfer/cuda/pinned.h"

#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <vector>

#include "common/integers.h"
#include "offload/transfer/mover.h"

namespace weft::offload {
namespace {

constexpr int64_t kHugePage = 2 << 20;
constexpr int64_t kThreads = 8;
constexpr int64_t kTouched = 32 << 20;  // at most, by several threads at once: less is not worth their start

int64_t page_size() {
  static const int64_t size = sysconf(_SC_PAGESIZE);
  return size;
}

// Sizes of the buffers mapped by this process. A forked child inherits the table, but not the memory.
struct Mapped {
  const pid_t owner = getpid();
  std::mutex mutex;
  std::unordered_map<void*, size_t> all;
};
Mapped& mapped() {
  static Mapped* const all = new Mapped;
  return *all;
}

void touch_pages(char* begin, char* end) {
  for (volatile char* p = begin; p < end; p += page_size()) *p = 0;
}

void touch(char* data, int64_t bytes) {
  const int64_t parts = std::clamp<int64_t>(std::thread::hardware_concurrency(), 1, kThreads);
  const int64_t part = ceil_div(ceil_div(bytes, parts), kHugePage) * kHugePage;
  std::vector<std::thread> threads;
  threads.reserve(size_t(parts));
  int64_t begin = 0;
  try {
    for (; begin + part < bytes; begin += part) threads.emplace_back(touch_pages, data + begin, data + begin + part);
  } catch (const std::system_error&) {  // no more threads: this one touches the rest
  }
  touch_pages(data + begin, data + bytes);
  for (std::thread& thread : threads) thread.join();
}

// Does a piece of the work, and rests. False where either fails.
template <typename Work>
bool do_piece(const Rest& rest, const Work& work) {
  const auto begin = std::chrono::steady_clock::now();
  if (!work()) return false;
  return rest == nullptr || rest(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
}

// The end of the piece at `data`, of a buffer that ends at `end`.
char* piece_end(char* data, char* end) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  return data + std::min<int64_t>(end - data, kPinnedPiece - int64_t(address % uintptr_t(kPinnedPiece)));
}

void unmap(char* data, size_t size, char* registered) {
  for (char* piece = data; piece < registered; piece = piece_end(piece, data + size))
    if (cudaHostUnregister(piece) != cudaSuccess) cudaGetLastError();
  munmap(data, size);
}

// `given_up`: whether `rest` said so.
void* allocate_mapped(int64_t bytes, const Rest& rest, bool* given_up) {
  int device = 0, by_host_address = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&by_host_address, cudaDevAttrCanUseHostPointerForRegisteredMem, device) != cudaSuccess ||
      by_host_address == 0) {
    cudaGetLastError();  // clear it, as below
    return nullptr;
  }
  // Huge pages start at multiples of their size; the excess on both sides is unmapped at once.
  const auto size = size_t(ceil_div(bytes, page_size()) * page_size());
  void* const all = mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (all == MAP_FAILED) return nullptr;
  const size_t before = size_t(-reinterpret_cast<intptr_t>(all)) % kHugePage;
  char* const data = static_cast<char*>(all) + before;
  if (before > 0) munmap(all, before);
  munmap(data + size, kHugePage - before);
  madvise(data, size, MADV_HUGEPAGE);
  madvise(data, size, MADV_DONTFORK);  // else copy-on-write after a fork may give the address other pages
  char* touched = data;
  for (char *piece = data, *end; piece < data + size; piece = end) {
    end = piece_end(piece, data + size);
    bool refused = false;
    const bool done = do_piece(rest, [&] {
      if (rest != nullptr) {
        touch_pages(piece, end);
      } else if (piece >= touched) {
        touched = end + std::min<int64_t>(kTouched - kPinnedPiece, data + size - end);  // where a piece ends
        touch(piece, touched - piece);
      }
      refused = cudaHostRegister(piece, size_t(end - piece), cudaHostRegisterPortable | cudaHostRegisterMapped) !=
                cudaSuccess;
      return !refused;
    });
    if (done) continue;
    if (refused) cudaGetLastError();  // clear it, as below; cudaHostAlloc may still succeed
    unmap(data, size, refused ? piece : end);
    *given_up = !refused;
    return nullptr;
  }
  const std::lock_guard lock(mapped().mutex);
  mapped().all[data] = size;
  return data;
}

}  // namespace

void* allocate_pinned(int64_t bytes, const Rest& rest) {
  if (refused(refusals().host)) return nullptr;
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  bool given_up = false;
  void* data = bytes >= kPinnedWhole && mapped().owner == getpid() ? allocate_mapped(bytes, rest, &given_up) : nullptr;
  if (data != nullptr || given_up) return data;
  const auto allocate = [&] { return cudaHostAlloc(&data, size_t(bytes), cudaHostAllocPortable) == cudaSuccess; };
  if (do_piece(rest, allocate)) return data;
  if (data != nullptr) {
    free_pinned(data);
    return nullptr;
  }
  cudaGetLastError();  // clear it, or the next check reports it as its own
  return nullptr;
}

void free_pinned(void* data) {
  if (mapped().owner != getpid()) return;
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  size_t size = 0;
  {
    const std::lock_guard lock(mapped().mutex);
    if (const auto it = mapped().all.find(data); it != mapped().all.end()) {
      size = it->second;
      mapped().all.erase(it);
    }
  }
  if (size > 0)
    unmap(static_cast<char*>(data), size, static_cast<char*>(data) + size);
  else if (cudaFreeHost(data) != cudaSuccess)
    cudaGetLastError();
}

}  // namespace weft::offload
