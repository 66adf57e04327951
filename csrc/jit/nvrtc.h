// libnvrtc, opened at first use.
#pragma once
#include <nvrtc.h>

#include <string>
#include <vector>

namespace weft::jit {

struct Nvrtc {
  decltype(&::nvrtcVersion) version;
  decltype(&::nvrtcGetErrorString) error_string;
  decltype(&::nvrtcGetNumSupportedArchs) supported_count;
  decltype(&::nvrtcGetSupportedArchs) supported;
  decltype(&::nvrtcCreateProgram) create;
  decltype(&::nvrtcDestroyProgram) destroy;
  decltype(&::nvrtcCompileProgram) compile;
  decltype(&::nvrtcGetProgramLogSize) log_size;
  decltype(&::nvrtcGetProgramLog) log;
  decltype(&::nvrtcGetCUBINSize) cubin_size;
  decltype(&::nvrtcGetCUBIN) cubin;

  std::string version_text;        // "13.0"
  std::vector<int> architectures;  // compute capabilities it compiles for, e.g. 90
  std::string obstacle;            // why it cannot be used; empty where it can, and only then the rest is set
};

// Looks for the library once per process.
const Nvrtc& nvrtc();

}  // namespace weft::jit
