// The embedded sources. setup.py writes the definitions.
#pragma once
#include <span>
#include <string_view>

namespace weft::jit {

struct Source {
  std::string_view name;  // path below csrc
  std::string_view text;
};

extern const std::span<const Source> kSources;
extern const std::string_view kVersion;  // Weft's

}  // namespace weft::jit
