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

constexpr int64_t kLarge = 16 << 20, kHugePage = 2 << 20;
constexpr int64_t kThreads = 8;
constexpr int kRest = 3;  // how much longer than it worked a patient allocation rests

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

void touch(char* data, int64_t bytes) {
  const auto pages = [page = page_size()](char* begin, char* end) {
    for (volatile char* p = begin; p < end; p += page) *p = 0;
  };
  const int64_t parts = std::clamp<int64_t>(std::thread::hardware_concurrency(), 1, kThreads);
  const int64_t part = ceil_div(ceil_div(bytes, parts), kHugePage) * kHugePage;
  std::vector<std::thread> threads;
  threads.reserve(size_t(parts));
  int64_t begin = 0;
  try {
    for (; begin + part < bytes; begin += part) threads.emplace_back(pages, data + begin, data + begin + part);
  } catch (const std::system_error&) {  // no more threads: this one touches the rest
  }
  pages(data + begin, data + bytes);
  for (std::thread& thread : threads) thread.join();
}

// Does a piece of the work.
template <typename Work>
bool do_piece(bool patiently, const Work& work) {
  const auto begin = std::chrono::steady_clock::now();
  const bool done = work();
  if (patiently) std::this_thread::sleep_for(kRest * (std::chrono::steady_clock::now() - begin));
  return done;
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

void* allocate_mapped(int64_t bytes, bool patiently) {
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
  for (char *piece = data, *end; piece < data + size; piece = end) {
    end = piece_end(piece, data + size);
    const bool done = do_piece(patiently, [&] {
      touch(piece, end - piece);
      return cudaHostRegister(piece, size_t(end - piece), cudaHostRegisterPortable | cudaHostRegisterMapped) ==
             cudaSuccess;
    });
    if (done) continue;
    cudaGetLastError();  // clear it, as below; cudaHostAlloc may still succeed
    unmap(data, size, piece);
    return nullptr;
  }
  const std::lock_guard lock(mapped().mutex);
  mapped().all[data] = size;
  return data;
}

}  // namespace

void* allocate_pinned(int64_t bytes, bool patiently) {
  if (refused(refusals().host)) return nullptr;
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  void* data = bytes >= kLarge && mapped().owner == getpid() ? allocate_mapped(bytes, patiently) : nullptr;
  if (data != nullptr) return data;
  if (do_piece(patiently, [&] { return cudaHostAlloc(&data, size_t(bytes), cudaHostAllocPortable) == cudaSuccess; }))
    return data;
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
