// Kernels that nobody compiles or launches.
#pragma once
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/device.h"

namespace weft::jit {

struct Kernel {
  int max_active_clusters(dim3, int, int) const { return 0; }
  void launch(dim3, dim3, int, int, bool, cudaStream_t, void**) const {}
};
inline std::optional<std::string> why_unavailable(int) {
  return std::nullopt;
}
inline Kernel& kernel(const char*, const std::vector<std::string>&, const char*) {
  throw std::runtime_error("the planner compiles nothing");
}

}  // namespace weft::jit
