#include <algorithm>
#include <exception>
#include <map>
#include <stdexcept>
#include <thread>
#include <unordered_map>

#include "jit/digest.h"
#include "jit/disk_cache.h"
#include "jit/jit.h"
#include "jit/nvrtc.h"
#include "jit/sources.h"

namespace weft::jit {
namespace {

// What headers share with hosts has no execution space.
const char* const kOptions[] = {"-std=c++20", "-lineinfo", "-default-device"};

const Source& find_source(std::string_view name) {
  for (const Source& source : kSources) {
    if (source.name == name) return source;
  }
  throw std::runtime_error("weft: there is no embedded source " + std::string(name));
}

// What a source includes, itself and through others. A name that only a comment has does no harm.
std::vector<const Source*> included(const Source& source) {
  std::vector<const Source*> found{&source};
  for (size_t i = 0; i < found.size(); ++i) {
    for (const Source& other : kSources) {
      if (found[i]->text.find('"' + std::string(other.name) + '"') != std::string_view::npos &&
          std::find(found.begin(), found.end(), &other) == found.end()) {
        found.push_back(&other);
      }
    }
  }
  found.erase(found.begin());
  return found;
}

// From compute capability 9.0 on with the architecture's own instructions (wgmma and the like), which is also what
// makes a cubin run on exactly this capability.
std::string architecture(int arch) {
  return "sm_" + std::to_string(arch) + (arch >= 90 ? "a" : "");
}

std::string text_of(const Defines& defines) {
  std::string text;
  for (const std::string& define : defines) text += " -D" + define;
  return text;
}

std::vector<char> compile(const Nvrtc& rtc, const Source& source, const std::vector<const Source*>& headers,
                          const Defines& defines, int arch) {
  auto check = [&](nvrtcResult status, const char* what) {
    if (status != NVRTC_SUCCESS) {
      throw std::runtime_error("weft: " + std::string(source.name) + ": " + what + ": " + rtc.error_string(status));
    }
  };
  // NVRTC wants terminated strings, which a view does not promise.
  std::vector<std::string> strings;
  strings.reserve(2 * headers.size() + 2);
  auto terminated = [&](std::string_view view) { return strings.emplace_back(view).c_str(); };
  std::vector<const char*> texts, names;
  for (const Source* header : headers) {
    texts.push_back(terminated(header->text));
    names.push_back(terminated(header->name));
  }
  nvrtcProgram program = nullptr;
  check(rtc.create(&program, terminated(source.text), terminated(source.name), int(headers.size()), texts.data(),
                   names.data()),
        "nvrtcCreateProgram");
  struct Destroy {
    const Nvrtc& rtc;
    nvrtcProgram& program;
    ~Destroy() { rtc.destroy(&program); }
  } destroy{rtc, program};

  std::vector<std::string> options{"--gpu-architecture=" + architecture(arch)};
  options.insert(options.end(), std::begin(kOptions), std::end(kOptions));
  for (const std::string& define : defines) options.push_back("-D" + define);
  std::vector<const char*> pointers;
  for (const std::string& option : options) pointers.push_back(option.c_str());

  const nvrtcResult status = rtc.compile(program, int(pointers.size()), pointers.data());
  if (status != NVRTC_SUCCESS) {
    size_t size = 0;
    std::string log;
    if (rtc.log_size(program, &size) == NVRTC_SUCCESS && size > 1) {
      log.resize(size);
      if (rtc.log(program, log.data()) != NVRTC_SUCCESS) log.clear();
      log.resize(std::min(log.size(), log.find('\0')));
    }
    throw std::runtime_error("weft: " + std::string(source.name) + " does not compile for " + architecture(arch) +
                             " with" + (defines.empty() ? std::string(" no macros") : text_of(defines)) + " (NVRTC " +
                             rtc.version_text + ", " + rtc.error_string(status) + "):\n" + log);
  }
  size_t size = 0;
  check(rtc.cubin_size(program, &size), "nvrtcGetCUBINSize");
  std::vector<char> code(size);
  check(rtc.cubin(program, code.data()), "nvrtcGetCUBIN");
  return code;
}

std::string digest(const Nvrtc& rtc, const Source& source, const std::vector<const Source*>& headers,
                   const Defines& defines, int arch) {
  Sha256 sha;
  sha.field(kVersion).field(rtc.version_text).field(architecture(arch));
  for (const char* option : kOptions) sha.field(option);
  sha.field(std::to_string(defines.size()));
  for (const std::string& define : defines) sha.field(define);
  sha.field(source.name).field(source.text);
  for (const Source* header : headers) sha.field(header->name).field(header->text);
  return hex(sha.finish());
}

struct Slot {
  std::mutex mutex;  // held while its cubin is made, so that others who want it wait for it
  Cubin cubin;
};

Slot& slot(std::string_view source, const Defines& defines, int arch) {
  static std::mutex& mutex = *new std::mutex;
  static auto& slots = *new std::map<std::string, Slot>;  // nodes stay where they are
  std::string key = std::to_string(arch);
  key.append(1, '\0').append(source);
  for (const std::string& define : defines) key.append(1, '\0').append(define);
  std::lock_guard lock(mutex);
  return slots[key];
}

}  // namespace

std::optional<std::string> why_unavailable(int arch) {
#if CUDART_VERSION < 12080
  return "Weft is built with CUDA " + std::to_string(CUDART_VERSION / 1000) + "." +
         std::to_string(CUDART_VERSION % 1000 / 10) + ", loading compiled kernels needs 12.8";
#else
  const Nvrtc& rtc = nvrtc();
  if (!rtc.obstacle.empty()) return rtc.obstacle;
  if (arch != 0 && std::find(rtc.architectures.begin(), rtc.architectures.end(), arch) == rtc.architectures.end()) {
    return "NVRTC " + rtc.version_text + " does not compile for " + architecture(arch);
  }
  return std::nullopt;
#endif
}

std::string nvrtc_version() {
  return nvrtc().version_text;
}

std::string cache_dir() {
  const std::filesystem::path root = cache_root();
  return root.empty() ? std::string() : (root / kVersion).string();
}

Cubin cubin(std::string_view name, const Defines& defines, int arch, Origin* origin) {
  const Source& source = find_source(name);
  if (const auto why = why_unavailable(arch)) {
    throw std::runtime_error("weft: " + std::string(name) + " cannot be compiled: " + *why);
  }
  const Nvrtc& rtc = nvrtc();
  Slot& s = slot(name, defines, arch);
  std::lock_guard lock(s.mutex);
  Origin from = Origin::kMemory;
  if (s.cubin == nullptr) {
    const auto headers = included(source);
    const std::string folder = cache_dir();
    const auto path =
        std::filesystem::path(folder) / architecture(arch) / (digest(rtc, source, headers, defines, arch) + ".cubin");
    std::optional<std::vector<char>> code;
    from = Origin::kDisk;
    if (!folder.empty()) code = read_entry(path);
    if (!code) {
      from = Origin::kCompiled;
      code = compile(rtc, source, headers, defines, arch);
      if (!folder.empty()) write_entry(path, *code);
    }
    s.cubin = std::make_shared<const std::vector<char>>(std::move(*code));
  }
  if (origin != nullptr) *origin = from;
  return s.cubin;
}

std::vector<Cubin> cubins(const std::vector<Request>& requests) {
  std::vector<Cubin> results(requests.size());
  std::vector<std::exception_ptr> failures(requests.size());
  std::atomic<size_t> next{0};
  auto work = [&] {
    for (size_t i; (i = next.fetch_add(1)) < requests.size();) {
      try {
        results[i] = cubin(requests[i].source, requests[i].defines, requests[i].arch);
      } catch (...) {
        failures[i] = std::current_exception();
      }
    }
  };
  {
    std::vector<std::jthread> threads;
    const size_t count = std::min<size_t>(requests.size(), std::max(1u, std::thread::hardware_concurrency()));
    for (size_t i = 1; i < count; ++i) threads.emplace_back(work);
    work();
  }
  for (const auto& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
  return results;
}

}  // namespace weft::jit
