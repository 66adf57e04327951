// A CUDA runtime without a device, loaded before the real one: torch and the offload engine run on it as they are, with
// their streams, events, copies and torch's allocator. Device memory is host memory.
//
// Nothing that is enqueued runs before somebody has to wait for it, and then no more than that needs: a copy that
// nobody waits for comes after all that was to come after it, and whoever forgets a wait reads or writes the wrong
// bytes. A query says no, until told to let time pass (emulated_drain). An operation takes a microsecond. Kernels do
// nothing, but for those of zero-value compression, which are done by plain loops. Memory is filled with 0xff when it
// is given out, and when it is freed, so that who reads behind a free sees NaN. What a capture forbids is refused: a
// wait or a query across its border, and while another thread captures, what may wait or allocates, unless the calling
// thread's mode is relaxed.
//
// Every call is counted by its name.
#include <cuda_runtime_api.h>

#include <dlfcn.h>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace {

struct Stream;
struct Moment {
  Stream* stream = nullptr;
  int64_t position = 0;
};
struct Operation {
  std::function<void()> work;
  Moment needs;
};
struct Stream {
  std::deque<Operation> waiting;
  int64_t done = 0, enqueued = 0;
  std::vector<int64_t> ended{0};  // operation, from 1: when, see `now`
  bool captured = false;
};
struct Event {
  Moment at;
  bool recorded = false, captured = false;
};

std::recursive_mutex mutex;
int64_t now = 0;  // operations that have run
Stream default_stream;
std::vector<Stream*> streams{&default_stream};
std::map<std::string, int64_t> calls;
std::map<char*, size_t> host_memory, device_memory;
std::map<const void*, std::string> kernels;
int64_t refuse_host = 0, refuse_device = 0, errors = 0, waits = 0, forget = 0;
bool captured_elsewhere = false;  // by another thread, in the mode that forbids most
thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

using Lock = std::lock_guard<std::recursive_mutex>;

cudaError_t done(cudaError_t status) {
  if (status != cudaSuccess) last_error = status;
  return status;
}

Stream& of(cudaStream_t stream) {
  const auto handle = reinterpret_cast<uintptr_t>(stream);
  return handle <= 2 ? default_stream : *reinterpret_cast<Stream*>(stream);
}

void run_to(Stream& stream, int64_t position) {
  while (stream.done < position) {
    Operation operation = std::move(stream.waiting.front());
    stream.waiting.pop_front();
    if (operation.needs.stream != nullptr) run_to(*operation.needs.stream, operation.needs.position);
    if (operation.work) operation.work();
    ++stream.done;
    stream.ended.push_back(++now);
  }
}
void run(Stream& stream) {
  run_to(stream, stream.enqueued);
}
void run_all() {
  for (Stream* stream : streams) run(*stream);
}
void enqueue(Stream& stream, std::function<void()> work, Moment needs = {}) {
  stream.waiting.push_back({std::move(work), needs});
  ++stream.enqueued;
}

bool inside(const std::map<char*, size_t>& memory, const void* data, size_t bytes) {
  auto it = memory.upper_bound(static_cast<char*>(const_cast<void*>(data)));
  if (it == memory.begin()) return false;
  --it;
  return static_cast<const char*>(data) + bytes <= it->first + it->second;
}

void copy(void* to, const void* from, size_t bytes) {
  for (const void* data : {static_cast<const void*>(to), from}) {
    // Memory of neither is pageable: whoever gave it waits.
    auto it = device_memory.upper_bound(static_cast<char*>(const_cast<void*>(data)));
    if (it != device_memory.begin() && (--it, static_cast<const char*>(data) < it->first + it->second) &&
        !inside(device_memory, data, bytes))
      ++errors;
  }
  std::memmove(to, from, bytes);
}

}  // namespace

#define CALL(name)                              \
  const Lock lock(mutex);                       \
  static int64_t& count_of_calls = calls[name]; \
  ++count_of_calls
#define ALLOWED()                                                           \
  if (captured_elsewhere && capture_mode != cudaStreamCaptureModeRelaxed) { \
    return ++errors, done(cudaErrorStreamCaptureUnsupported);               \
  }

extern "C" {

// ---- For tests

int64_t emulated_calls(const char* name) {
  const Lock lock(mutex);
  return calls[name];
}
int64_t emulated_errors() {
  return errors;
}
void emulated_drain(void* stream) {
  const Lock lock(mutex);
  stream == nullptr ? run_all() : run(of(static_cast<cudaStream_t>(stream)));
}
void emulated_capture(void* stream, bool begin) {
  of(static_cast<cudaStream_t>(stream)).captured = begin;
}
void emulated_capture_elsewhere(bool begin) {
  captured_elsewhere = begin;
}
// Lets every so-manieth wait of a stream be none; 0 for none.
void emulated_forget(int64_t every) {
  forget = every;
}
void emulated_refuse(int64_t host, int64_t device) {
  refuse_host = host, refuse_device = device;
}

// ---- Devices

cudaError_t cudaGetDeviceCount(int* count) {
  return *count = 1, cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  CALL("GetDevice");
  return *device = 0, cudaSuccess;
}
cudaError_t cudaSetDevice(int) {
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  return *version = CUDART_VERSION, cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  return *version = CUDART_VERSION, cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = 4;
      break;
    case cudaDevAttrMemoryClockRate:
      *value = 3'200'000;
      break;
    case cudaDevAttrGlobalMemoryBusWidth:
      *value = 6144;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = 227 << 10;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = 48 << 10;
      break;
    case cudaDevAttrMaxThreadsPerBlock:
      *value = 1024;
      break;
    case cudaDevAttrMaxGridDimX:
      *value = 0x7fffffff;
      break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
      *value = 65535;
      break;
    case cudaDevAttrWarpSize:
      *value = 32;
      break;
    default:
      *value = 1;
  }
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  std::memset(p, 0, sizeof *p);
  std::strcpy(p->name, "no device");
  p->totalGlobalMem = size_t(8) << 30;
  p->major = 9, p->minor = 0, p->multiProcessorCount = 4, p->warpSize = 32;
  p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = 2048, p->regsPerBlock = 65536;
  p->sharedMemPerBlock = 48 << 10, p->sharedMemPerBlockOptin = 227 << 10, p->sharedMemPerMultiprocessor = 228 << 10;
  p->maxGridSize[0] = 0x7fffffff, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->l2CacheSize = 1 << 20, p->memPitch = 0x7fffffff, p->textureAlignment = 512;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return *least = 0, *greatest = -5, cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  return *can = 0, cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  CALL("DeviceSynchronize");
  return run_all(), cudaSuccess;
}
cudaError_t cudaGetLastError() {
  const cudaError_t status = last_error;
  return last_error = cudaSuccess, status;
}
cudaError_t cudaPeekAtLastError() {
  return last_error;
}

// The driver's functions that torch asks for by name; this library is found as the driver, too.
int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  if (flags != nullptr) *flags = 0;
  return *active = 1, 0;
}
static int not_here(...) {
  return 999;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = std::strcmp(symbol, "cuDevicePrimaryCtxGetState") == 0
                  ? reinterpret_cast<void*>(cuDevicePrimaryCtxGetState)
                  : reinterpret_cast<void*>(not_here);
  if (result != nullptr) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// ---- Memory

cudaError_t cudaMalloc(void** data, size_t bytes) {
  CALL("Malloc");
  ALLOWED();
  if (refuse_device > 0 && refuse_device-- > 0) return done(cudaErrorMemoryAllocation);
  *data = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  std::memset(*data, 0xff, bytes);
  device_memory[static_cast<char*>(*data)] = bytes;
  return cudaSuccess;
}
cudaError_t cudaMallocManaged(void** data, size_t bytes, unsigned) {
  CALL("MallocManaged");
  return cudaMalloc(data, bytes);
}
cudaError_t cudaMemPrefetchAsync(const void*, size_t, cudaMemLocation, unsigned, cudaStream_t stream) {
  CALL("MemPrefetchAsync");
  return enqueue(of(stream), {}), cudaSuccess;
}
cudaError_t cudaFree(void* data) {
  CALL("Free");
  ALLOWED();
  if (data == nullptr) return cudaSuccess;
  run_all();
  std::memset(data, 0xff, device_memory[static_cast<char*>(data)]);
  device_memory.erase(static_cast<char*>(data));
  std::free(data);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  return *free = *total = size_t(8) << 30, cudaSuccess;
}
cudaError_t cudaHostAlloc(void** data, size_t bytes, unsigned) {
  CALL("HostAlloc");
  ALLOWED();
  if (refuse_host > 0 && refuse_host-- > 0) return done(cudaErrorMemoryAllocation);
  *data = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  std::memset(*data, 0xff, bytes);
  host_memory[static_cast<char*>(*data)] = bytes;
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* data) {
  CALL("FreeHost");
  ALLOWED();
  run_all();
  host_memory.erase(static_cast<char*>(data));
  std::free(data);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* data, size_t bytes, unsigned) {
  CALL("HostRegister");
  ALLOWED();
  if (refuse_host > 0) return done(cudaErrorMemoryAllocation);
  host_memory[static_cast<char*>(data)] = bytes;
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* data) {
  CALL("HostUnregister");
  ALLOWED();
  run_all();
  host_memory.erase(static_cast<char*>(data));
  return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  return *device = host, cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* data) {
  const Lock lock(mutex);
  std::memset(attributes, 0, sizeof *attributes);
  attributes->type = inside(device_memory, data, 1) ? cudaMemoryTypeDevice
                     : inside(host_memory, data, 1) ? cudaMemoryTypeHost
                                                    : cudaMemoryTypeUnregistered;
  attributes->hostPointer = attributes->devicePointer = const_cast<void*>(data);
  return cudaSuccess;
}
static cudaError_t start_copy(void* to, const void* from, size_t bytes, cudaStream_t stream) {
  const bool pageable = !inside(device_memory, to, 1) && !inside(host_memory, to, 1);
  const bool from_pageable = !inside(device_memory, from, 1) && !inside(host_memory, from, 1);
  // A copy of pinned memory stays within what was pinned at once.
  for (const void* data : {static_cast<const void*>(to), from})
    if (inside(host_memory, data, 1) && !inside(host_memory, data, bytes)) return ++errors, done(cudaErrorInvalidValue);
  Stream& on = of(stream);
  if (from_pageable) {  // staged before the call returns
    std::vector<char> staged(static_cast<const char*>(from), static_cast<const char*>(from) + bytes);
    enqueue(on, [to, staged = std::move(staged)] { copy(to, staged.data(), staged.size()); });
  } else {
    enqueue(on, [=] { copy(to, from, bytes); });
  }
  if (pageable) run(on);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  CALL("MemcpyAsync");
  return start_copy(to, from, bytes, stream);
}
#if CUDART_VERSION >= 13000
// Its copies in the order that their caller may expect least.
cudaError_t cudaMemcpyBatchAsync(void* const* to, const void* const* from, const size_t* bytes, size_t count,
                                 cudaMemcpyAttributes* attributes, size_t* firsts, size_t kinds, cudaStream_t stream) {
  CALL("MemcpyBatchAsync");
  if (kinds != 1 || *firsts != 0 || attributes->srcAccessOrder != cudaMemcpySrcAccessOrderStream)
    return ++errors, done(cudaErrorInvalidValue);
  for (size_t i = count; i-- > 0;)
    if (const cudaError_t status = start_copy(to[i], from[i], bytes[i], stream); status != cudaSuccess) return status;
  return cudaSuccess;
}
#endif
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  CALL("Memcpy");
  run_all();
  copy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  CALL("MemsetAsync");
  enqueue(of(stream), [=] { std::memset(to, value, bytes); });
  return cudaSuccess;
}

// ---- Streams

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  const Lock lock(mutex);
  streams.push_back(new Stream);
  *stream = reinterpret_cast<cudaStream_t>(streams.back());
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamDestroy(cudaStream_t) {
  return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  return *priority = 0, cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  CALL("StreamQuery");
  return of(stream).waiting.empty() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  CALL("StreamSynchronize");
  ALLOWED();
  if (of(stream).captured) return done(cudaErrorStreamCaptureUnsupported);
  return run(of(stream)), cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  CALL("StreamIsCapturing");
  *status = of(stream).captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long*,
                                     cudaGraph_t* graph, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  CALL("StreamGetCaptureInfo");
  *status = of(stream).captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  *graph = nullptr;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  CALL("ThreadExchangeStreamCaptureMode");
  return std::swap(*mode, capture_mode), cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t handle, unsigned) {
  CALL("StreamWaitEvent");
  const Event& event = *reinterpret_cast<Event*>(handle);
  if (!event.recorded) return cudaSuccess;
  if (event.captured != of(stream).captured) return ++errors, done(cudaErrorStreamCaptureIsolation);
  if (forget > 0 && ++waits % forget == 0) return cudaSuccess;
  if (event.at.stream != &of(stream)) enqueue(of(stream), {}, event.at);
  return cudaSuccess;
}

// ---- Events

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  CALL("EventCreate");
  return *event = reinterpret_cast<cudaEvent_t>(new Event), cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, 0);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<Event*>(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
  CALL("EventRecord");
  Stream& on = of(stream);
  *reinterpret_cast<Event*>(handle) = {{&on, on.enqueued}, true, on.captured};
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventQuery(cudaEvent_t handle) {
  CALL("EventQuery");
  ALLOWED();
  const Event& event = *reinterpret_cast<Event*>(handle);
  if (event.captured) return ++errors, done(cudaErrorCapturedEvent);
  return !event.recorded || event.at.stream->done >= event.at.position ? cudaSuccess : done(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  CALL("EventSynchronize");
  ALLOWED();
  const Event& event = *reinterpret_cast<Event*>(handle);
  if (event.recorded) run_to(*event.at.stream, event.at.position);
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  CALL("EventElapsedTime");
  int64_t times[2];
  for (int i = 0; i < 2; ++i) {
    const Event& event = *reinterpret_cast<Event*>(i == 0 ? begin : end);
    if (!event.recorded || event.at.stream->done < event.at.position) return done(cudaErrorNotReady);
    times[i] = event.at.stream->ended[size_t(event.at.position)];
  }
  return *ms = 1e-3f * float(times[1] - times[0]), cudaSuccess;
}

// ---- Kernels

// What the launchers of csrc/offload/cuda/zvc_compress.h take.
struct Compress {
  const void* x;
  int64_t n;
  int itemsize;
  uint32_t* mask;
  void* values;
  int64_t capacity;
  int64_t* size;
  void* all;
};
struct Decompress {
  const uint32_t* mask;
  const void* values;
  int64_t available;
  void* out;
  int64_t n;
  int itemsize;
  const void* all;
};
static void compress(const Compress& c) {
  int64_t count = 0;
  std::memset(c.mask, 0, size_t((c.n + 31) / 32 * 4));
  for (int64_t i = 0; i < c.n; ++i) {
    const char* from = static_cast<const char*>(c.x) + i * c.itemsize;
    uint32_t bits = 0;
    std::memcpy(&bits, from, size_t(c.itemsize));
    if (bits == 0) continue;
    c.mask[i / 32] |= 1u << (i % 32);
    void* to = count < c.capacity ? c.values : c.all;
    if (to != nullptr) std::memcpy(static_cast<char*>(to) + count * c.itemsize, from, size_t(c.itemsize));
    ++count;
  }
  *c.size = count;
}
static void decompress(const Decompress& d) {
  int64_t count = 0;
  for (int64_t i = 0; i < d.n; ++i) {
    char* to = static_cast<char*>(d.out) + i * d.itemsize;
    std::memset(to, 0, size_t(d.itemsize));
    if ((d.mask[i / 32] >> (i % 32) & 1) == 0) continue;
    const void* from = count < d.available ? d.values : d.all;
    if (from != nullptr) std::memcpy(to, static_cast<const char*>(from) + count * d.itemsize, size_t(d.itemsize));
    ++count;
  }
}

void __cudaRegisterFunction(void** binary, const char* host, char* device, const char* name, int limit, uint3* thread,
                            uint3* block, dim3* block_size, dim3* grid_size, int* warp) {
  static const auto real =
      reinterpret_cast<decltype(&__cudaRegisterFunction)>(dlsym(RTLD_NEXT, "__cudaRegisterFunction"));
  {
    const Lock lock(mutex);
    kernels[host] = name;
  }
  real(binary, host, device, name, limit, thread, block, block_size, grid_size, warp);
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  return *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host)), cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void* host, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  CALL("LaunchKernel");
  const std::string& name = kernels[host];
  if (name.find("offload") == std::string::npos) return cudaSuccess;
  if (name.find("decompress_kernel") != std::string::npos) {
    enqueue(of(stream), [d = *static_cast<Decompress*>(arguments[0])] { decompress(d); });
  } else if (name.find("compress_kernel") != std::string::npos) {
    enqueue(of(stream), [c = *static_cast<Compress*>(arguments[0])] { compress(c); });
  }
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared,
                               cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) {
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  return *blocks = 1, cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  return *blocks = 1, cudaSuccess;
}
}
