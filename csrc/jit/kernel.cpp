#include <shared_mutex>
#include <stdexcept>
#include <unordered_map>

#include "common/launch.h"
#include "jit/jit.h"
#include "jit/too_many_blocks.h"

namespace weft::jit {
namespace {

// Loading a module is refused to a thread that captures a graph, although it adds nothing to the graph.
class Uncaptured {
 public:
  Uncaptured() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~Uncaptured() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

cudaLaunchAttribute cluster_attribute(unsigned cluster_size) {
  cudaLaunchAttribute a{};
  a.id = cudaLaunchAttributeClusterDimension;
  a.val.clusterDim.x = cluster_size;
  a.val.clusterDim.y = a.val.clusterDim.z = 1;
  return a;
}

}  // namespace

void Kernel::refuse(const std::string& why) const {
  refuse_launch(name_, why);
}

void Kernel::check(cudaError_t status, const char* what) const {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // or the next one who asks takes it for theirs
  refuse(std::string(what) + ": " + cudaGetErrorString(status));
}

Kernel::Kernel(std::string name, const Cubin& code, const char* entry) : name_(std::move(name)) {
  const DeviceLimits& limits = device_limits();
  check(cudaGetDevice(&device_), "cudaGetDevice");
  capability_ = limits.compute_capability;
  sm_count_ = limits.sm_count;
#if CUDART_VERSION < 12080
  refuse("loading it needs a build with CUDA 12.8");
#else
  const Uncaptured uncaptured;
  // Never unloaded: the driver may be gone when the process's objects are destroyed.
  cudaLibrary_t library = nullptr;
  check(cudaLibraryLoadData(&library, code->data(), nullptr, nullptr, 0, nullptr, nullptr, 0), "cudaLibraryLoadData");
  cudaKernel_t kernel = nullptr;
  check(cudaLibraryGetKernel(&kernel, library, entry), "cudaLibraryGetKernel");
  function_ = kernel;
  // Asking for the attributes also brings the code to the device, so that a launch under capture finds it there.
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, function_), "cudaFuncGetAttributes");
  registers_ = attributes.numRegs;
  local_bytes_ = int(attributes.localSizeBytes);
  static_shared_bytes_ = int(attributes.sharedSizeBytes);
  max_threads_ = attributes.maxThreadsPerBlock;
  allowed_shared_ = unsigned(attributes.maxDynamicSharedSizeBytes);
#endif
}

std::string Kernel::obstacle(dim3 block, unsigned shared_bytes, unsigned cluster_size) const {
  if (std::string why = block_obstacle(block, shared_bytes, size_t(max_threads_), size_t(static_shared_bytes_));
      !why.empty()) {
    return why;
  }
  if (cluster_size > 1 && capability_ < 90) {
    return "clusters of " + std::to_string(cluster_size) + " blocks need compute capability 9.0, the device has " +
           std::to_string(capability_ / 10) + "." + std::to_string(capability_ % 10);
  }
  if (cluster_size > 16) return "clusters of " + std::to_string(cluster_size) + " blocks, the device takes up to 16";
  return {};
}

void Kernel::allow(unsigned shared_bytes, unsigned cluster_size) {
  if (shared_bytes <= allowed_shared_ && (cluster_size <= 8 || allowed_cluster_)) return;
  std::lock_guard lock(attributes_);  // so that nobody's larger size is overwritten
  if (shared_bytes > allowed_shared_) {
    check(cudaFuncSetAttribute(function_, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes)),
          "cudaFuncAttributeMaxDynamicSharedMemorySize");
    allowed_shared_ = shared_bytes;
  }
  if (cluster_size > 8 && !allowed_cluster_) {
    check(cudaFuncSetAttribute(function_, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
          "cudaFuncAttributeNonPortableClusterSizeAllowed");
    allowed_cluster_ = true;
  }
}

void Kernel::launch(Grid grid, dim3 block, unsigned shared_bytes, unsigned cluster_size, bool cooperative,
                    cudaStream_t stream, void** args) {
  if (grid.empty()) return;
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  if (device != device_) {
    refuse("loaded for device " + std::to_string(device_) + ", the current one is " + std::to_string(device));
  }
  for (const std::string& why : {grid_obstacle(grid), obstacle(block, shared_bytes, cluster_size)}) {
    if (!why.empty()) refuse(why);
  }
  if (cluster_size > 1 && grid.x % cluster_size != 0) {
    refuse("grid " + grid.text() + " is not made of clusters of " + std::to_string(cluster_size) + " blocks");
  }
  allow(shared_bytes, cluster_size);

  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config{};
  config.gridDim = grid.dims();
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  if (cluster_size > 1) attributes[config.numAttrs++] = cluster_attribute(cluster_size);
  if (cooperative) {
    attributes[config.numAttrs].id = cudaLaunchAttributeCooperative;
    attributes[config.numAttrs++].val.cooperative = 1;
  }
  const cudaError_t status = cudaLaunchKernelExC(&config, function_, args);
  if (status == cudaSuccess) return;
  cudaGetLastError();
  std::string shape = "grid " + grid.text() + ", block " + Grid(block).text() + ", " + std::to_string(shared_bytes) +
                      " bytes of shared memory";
  if (cluster_size > 1) shape += ", clusters of " + std::to_string(cluster_size);
  if (cooperative) shape += ", cooperative";
  const std::string why = shape + ": " + cudaGetErrorString(status);
  if (status != cudaErrorCooperativeLaunchTooLarge) refuse(why);
  const std::string fits = "; " + std::to_string(max_active_blocks_per_sm(block, shared_bytes)) +
                           " blocks fit on each of " + std::to_string(sm_count_) + " multiprocessors";
  try {
    refuse(why + fits);
  } catch (const std::runtime_error& error) {
    throw TooManyBlocks(error.what());
  }
}

int Kernel::max_active_clusters(dim3 block, unsigned shared_bytes, unsigned cluster_size) {
  if (!obstacle(block, shared_bytes, cluster_size).empty()) return 0;
  if (cluster_size <= 1) return max_active_blocks_per_sm(block, shared_bytes) * sm_count_;
  allow(shared_bytes, cluster_size);
  cudaLaunchAttribute attribute = cluster_attribute(cluster_size);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(cluster_size);
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int count = 0;
  const cudaError_t status = cudaOccupancyMaxActiveClusters(&count, function_, &config);
  if (status == cudaErrorInvalidClusterSize) {
    cudaGetLastError();
    return 0;
  }
  check(status, "cudaOccupancyMaxActiveClusters");
  return count;
}

int Kernel::max_active_blocks_per_sm(dim3 block, unsigned shared_bytes) {
  if (!obstacle(block, shared_bytes, 1).empty()) return 0;
  allow(shared_bytes, 1);
  int count = 0;
  check(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, function_, int(block.x * block.y * block.z), shared_bytes),
      "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  return count;
}

Kernel& kernel(std::string_view source, const Defines& defines, const char* entry) {
  struct Slot {
    std::mutex mutex;  // held while its kernel is loaded
    std::atomic<Kernel*> kernel{nullptr};
  };
  static std::shared_mutex& mutex = *new std::shared_mutex;
  static auto& slots = *new std::unordered_map<std::string, Slot>;  // nodes stay where they are
  thread_local std::string key;                                     // no allocation for a kernel that is there

  int device = 0;
  cuda_check(cudaGetDevice(&device), "cudaGetDevice");
  key.assign(1, char(device)).append(1, char(device >> 8)).append(source).append(1, '\0').append(entry);
  for (const std::string& define : defines) key.append(1, '\0').append(define);
  Slot* slot = nullptr;
  {
    std::shared_lock lock(mutex);
    if (auto found = slots.find(key); found != slots.end()) slot = &found->second;
  }
  if (slot == nullptr) {
    std::lock_guard lock(mutex);
    slot = &slots[key];
  }
  if (Kernel* known = slot->kernel.load(std::memory_order_acquire)) return *known;
  std::lock_guard lock(slot->mutex);
  if (Kernel* known = slot->kernel.load(std::memory_order_relaxed)) return *known;
  const Cubin code = cubin(source, defines, device_limits().compute_capability);
  auto made = std::make_unique<Kernel>(std::string(source) + ":" + entry, code, entry);
  slot->kernel.store(made.get(), std::memory_order_release);
  return *made.release();
}

}  // namespace weft::jit
