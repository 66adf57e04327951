#include "jit/nvrtc.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>

namespace weft::jit {
namespace {

constexpr int kMajor = CUDART_VERSION / 1000;

std::string soname() {
  return "libnvrtc.so." + std::to_string(kMajor);
}

void* open(const std::string& path) {
  return ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
}

std::string last_error() {
  const char* error = ::dlerror();
  return error == nullptr ? "unknown error" : error;
}

std::vector<std::filesystem::path> folders() {
  std::vector<std::filesystem::path> found;
  // pip puts libnvrtc into libcudart's folder (CUDA 13) or into a package beside it (CUDA 12).
  Dl_info cudart;
  if (::dladdr(reinterpret_cast<void*>(&::cudaGetDevice), &cudart) != 0 && cudart.dli_fname != nullptr) {
    const std::filesystem::path folder = std::filesystem::path(cudart.dli_fname).parent_path();
    found.push_back(folder);
    found.push_back(folder / ".." / ".." / "cuda_nvrtc" / "lib");
  }
  for (const char* variable : {"CUDA_HOME", "CUDA_PATH"}) {
    if (const char* home = std::getenv(variable); home != nullptr && *home != '\0') {
      found.push_back(std::filesystem::path(home) / "lib64");
    }
  }
  found.push_back("/usr/local/cuda/lib64");
  return found;
}

void* find(std::string& obstacle) {
  if (const char* chosen = std::getenv("WEFT_NVRTC"); chosen != nullptr && *chosen != '\0') {
    void* library = open(chosen);
    if (library == nullptr) obstacle = "WEFT_NVRTC: " + last_error();
    return library;
  }
  const std::string name = soname();
  if (void* library = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD)) return library;
  if (void* library = open(name)) return library;
  for (const auto& folder : folders()) {
    std::error_code ignored;
    if (!std::filesystem::exists(folder / name, ignored)) continue;
    if (void* library = open((folder / name).string())) return library;
  }
  obstacle = name + " is not found; install nvidia-cuda-nvrtc or set WEFT_NVRTC to its path";
  return nullptr;
}

Nvrtc load() {
  Nvrtc n{};
  void* library = find(n.obstacle);
  if (library == nullptr) return n;
  auto symbol = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, name));
    if (function == nullptr && n.obstacle.empty()) n.obstacle = "libnvrtc has no " + std::string(name);
  };
  symbol(n.version, "nvrtcVersion");
  symbol(n.error_string, "nvrtcGetErrorString");
  symbol(n.supported_count, "nvrtcGetNumSupportedArchs");
  symbol(n.supported, "nvrtcGetSupportedArchs");
  symbol(n.create, "nvrtcCreateProgram");
  symbol(n.destroy, "nvrtcDestroyProgram");
  symbol(n.compile, "nvrtcCompileProgram");
  symbol(n.log_size, "nvrtcGetProgramLogSize");
  symbol(n.log, "nvrtcGetProgramLog");
  symbol(n.cubin_size, "nvrtcGetCUBINSize");
  symbol(n.cubin, "nvrtcGetCUBIN");
  if (!n.obstacle.empty()) return n;

  int major = 0, minor = 0, count = 0;
  nvrtcResult status = n.version(&major, &minor);
  n.version_text = std::to_string(major) + "." + std::to_string(minor);
  // A newer major version may write what the runtime of the build cannot load, an older one knows less than is asked.
  if (status == NVRTC_SUCCESS && major != kMajor) {
    n.obstacle = "NVRTC is of CUDA " + n.version_text + ", Weft is built with CUDA " + std::to_string(kMajor);
    return n;
  }
  if (status == NVRTC_SUCCESS) status = n.supported_count(&count);
  n.architectures.resize(static_cast<size_t>(count));
  if (status == NVRTC_SUCCESS) status = n.supported(n.architectures.data());
  if (status != NVRTC_SUCCESS) n.obstacle = std::string("NVRTC: ") + n.error_string(status);
  return n;
}

}  // namespace

const Nvrtc& nvrtc() {
  static const Nvrtc& loaded = *new Nvrtc(load());  // never closed: other threads may compile while the process ends
  return loaded;
}

}  // namespace weft::jit
