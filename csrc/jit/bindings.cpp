// jit, as Python sees it: the run-time compiler's state, and launches for the tests.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "jit/digest.h"
#include "jit/jit.h"
#include "jit/sources.h"

namespace py = pybind11;

namespace weft::jit {
namespace {

using Size = std::tuple<unsigned, unsigned, unsigned>;
dim3 to_dim3(Size s) {
  return dim3(std::get<0>(s), std::get<1>(s), std::get<2>(s));
}

}  // namespace

void bind(py::module_& m, py::module_& testing) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  testing.def(
      "jit_compile",
      [](const std::string& source, const Defines& defines, int arch) {
        Origin origin;
        Cubin code;
        {
          py::gil_scoped_release release;
          code = cubin(source, defines, arch, &origin);
        }
        constexpr const char* kOrigins[] = {"memory", "disk", "compiled"};
        return py::make_tuple(py::bytes(code->data(), code->size()), kOrigins[int(origin)]);
      },
      "(cubin, where it came from: 'memory', 'disk' or 'compiled') of an embedded source.", py::arg("source"),
      py::arg("defines"), py::arg("arch"));
  m.def(
      "compile_many",
      [](const std::vector<std::tuple<std::string, Defines, int>>& requests) {
        std::vector<Request> list;
        for (const auto& [source, defines, arch] : requests) list.push_back({source, defines, arch});
        cubins(list);
      },
      NoGil(), "Compiles all (source, defines, arch), several at a time.", py::arg("requests"));
  m.def("why_unavailable", &why_unavailable, NoGil(), "Why nothing can be compiled here, or None.",
        py::arg("arch") = 0);
  m.def("version", &nvrtc_version, NoGil(), "NVRTC's version; only where why_unavailable() is None.");
  m.def("cache_dir", &cache_dir, "Folder of the compiled kernels, '' where there is no place for one.");
  testing.def(
      "jit_sources",
      [] {
        py::dict sources;
        for (const auto& [name, text] : kSources) sources[py::str(name)] = py::bytes(text.data(), text.size());
        return sources;
      },
      "Name to text of every embedded source.");
  testing.def(
      "jit_sha256", [](const std::string& bytes) { return hex(Sha256().update(bytes).finish()); }, "For the tests.",
      py::arg("bytes"));
  testing.def(
      "jit_launch",
      [](const std::string& source, const Defines& defines, const std::string& entry, Size grid, Size block,
         unsigned shared_bytes, unsigned cluster_size, bool cooperative, uintptr_t stream,
         std::vector<long long> arguments) {
        std::vector<void*> pointers;
        for (auto& argument : arguments) pointers.push_back(&argument);
        jit::kernel(source, defines, entry.c_str())
            .launch(to_dim3(grid), to_dim3(block), shared_bytes, cluster_size, cooperative,
                    reinterpret_cast<cudaStream_t>(stream), pointers.data());
      },
      NoGil(), "Launches a kernel whose parameters are all 64 bits wide on the current device.", py::arg("source"),
      py::arg("defines"), py::arg("entry"), py::arg("grid"), py::arg("block"), py::arg("shared_bytes"),
      py::arg("cluster_size"), py::arg("cooperative"), py::arg("stream"), py::arg("arguments"));
  testing.def(
      "jit_limits",
      [](const std::string& source, const Defines& defines, const std::string& entry, Size block, unsigned shared_bytes,
         unsigned cluster_size) {
        Kernel& found = jit::kernel(source, defines, entry.c_str());
        py::gil_scoped_acquire acquire;
        py::dict facts;
        facts["registers"] = found.registers();
        facts["local_bytes"] = found.local_bytes();
        facts["static_shared_bytes"] = found.static_shared_bytes();
        facts["max_threads"] = found.max_threads();
        facts["sm_count"] = found.sm_count();
        facts["max_active_blocks_per_sm"] = found.max_active_blocks_per_sm(to_dim3(block), shared_bytes);
        facts["max_active_clusters"] = found.max_active_clusters(to_dim3(block), shared_bytes, cluster_size);
        return facts;
      },
      NoGil(), "What a kernel takes and how much of it the current device holds at once.", py::arg("source"),
      py::arg("defines"), py::arg("entry"), py::arg("block"), py::arg("shared_bytes"), py::arg("cluster_size"));
}

}  // namespace weft::jit
