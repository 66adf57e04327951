// Kernels that are compiled when they are first needed. The sources (csrc/**/*.jit.cu) are embedded in the library;
// NVRTC compiles one for the constants at hand, given as macros; the machine code is kept in memory and on disk.
//
// Sources are named by their path below csrc, e.g. "jit/probe.jit.cu". They include nothing but other files of csrc, by
// that path, because NVRTC comes without headers; what they include is embedded, too, and may be shared with hosts.
// Entry points are extern "C" __global__. Every function here may be called from any thread; two that ask for the same
// thing share one compilation. Errors are std::runtime_error.
//
// What is needed at run time: libnvrtc of the CUDA major version of the build, opened at first use and looked for in
// $WEFT_NVRTC (a path; then nowhere else), among the libraries already loaded, by its name, beside libcudart (where pip
// installs it), and in $CUDA_HOME/lib64. libcuda is never opened from here: kernels are loaded through the runtime.
//
// On disk: $WEFT_CACHE_DIR, else ~/.cache/weft, then <version>/<architecture>/<digest>.cubin. The digest is that of
// Weft's version, the compiler's, its options, the source and what it includes. An entry is written to a temporary file
// and renamed, and ends with a checksum; one that is damaged is removed and made again. A cache that cannot be read or
// written costs compilations, nothing else.
#pragma once
#include <cuda_runtime_api.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/launch.h"

namespace weft::jit {

// "NAME=value" macros, in order.
using Defines = std::vector<std::string>;
using Cubin = std::shared_ptr<const std::vector<char>>;

enum class Origin { kMemory, kDisk, kCompiled };

// Machine code of an embedded source for a compute capability (90 for sm_90; from there on with the architecture's own
// instructions, sm_90a). Needs no GPU. A failed compilation throws with the compiler's log.
Cubin cubin(std::string_view source, const Defines& defines, int arch, Origin* origin = nullptr);

struct Request {
  std::string source;
  Defines defines;
  int arch;
};

// The same for many, as many at a time as there are processors. All are tried; the first failure is thrown at the end.
std::vector<Cubin> cubins(const std::vector<Request>& requests);

// Why nothing can be compiled here (for this compute capability, unless 0); nothing where it can.
std::optional<std::string> why_unavailable(int arch = 0);

// "13.0"; why_unavailable() must be nothing.
std::string nvrtc_version();

// Folder of the cubins of this version of Weft, empty where there is no place for one. It may not exist yet.
std::string cache_dir();

// A kernel on one device, which must be the current one when it is launched or asked about. Lives as long as the
// process, so a reference to it may be kept.
class Kernel {
 public:
  Kernel(std::string name, const Cubin& code, const char* entry);  // on the current device
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  // args[i] points to the i-th parameter. cluster_size blocks along x form a cluster (0 or 1: none; it divides grid.x).
  // A cooperative launch is refused where not all of its blocks can be resident at once. Raises the kernel's limit of
  // dynamic shared memory and allows clusters of more than 8 blocks where they are asked for. Does not synchronise and
  // may be captured in a graph. An empty grid launches nothing.
  void launch(Grid grid, dim3 block, unsigned shared_bytes, unsigned cluster_size, bool cooperative,
              cudaStream_t stream, void** args);

  // How many clusters of this size are resident on the device at once, 0 where not even one can be.
  int max_active_clusters(dim3 block, unsigned shared_bytes, unsigned cluster_size);
  // How many blocks are resident on one multiprocessor at once, 0 where not even one can be.
  int max_active_blocks_per_sm(dim3 block, unsigned shared_bytes);

  int registers() const { return registers_; }      // per thread
  int local_bytes() const { return local_bytes_; }  // per thread; above 0 registers are spilled or arrays indexed
  int static_shared_bytes() const { return static_shared_bytes_; }
  int max_threads() const { return max_threads_; }  // per block
  int device() const { return device_; }
  int sm_count() const { return sm_count_; }
  const std::string& name() const { return name_; }

 private:
  [[noreturn]] void refuse(const std::string& why) const;
  void check(cudaError_t status, const char* what) const;
  // Why a block of this shape cannot run at all, empty where it can.
  std::string obstacle(dim3 block, unsigned shared_bytes, unsigned cluster_size) const;
  void allow(unsigned shared_bytes, unsigned cluster_size);

  std::string name_;
  const void* function_ = nullptr;
  int device_ = 0, capability_ = 0, sm_count_ = 0;
  int registers_ = 0, local_bytes_ = 0, static_shared_bytes_ = 0, max_threads_ = 0;
  std::mutex attributes_;
  std::atomic<unsigned> allowed_shared_{0};
  std::atomic<bool> allowed_cluster_{false};
};

// The kernel `entry` of an embedded source on the current device, compiled and loaded where it is not yet. A look-up
// takes a fraction of a microsecond.
Kernel& kernel(std::string_view source, const Defines& defines, const char* entry);

}  // namespace weft::jit
