// The Python module weft._C: loading it registers the operators; pybind11 carries only what is not a tensor.
#include <pybind11/pybind11.h>

#ifdef WEFT_WITH_CUDA
#include <pybind11/stl.h>

#include "jit/digest.h"
#include "jit/jit.h"
#include "jit/sources.h"
#include "rnn/rnn_cuda.h"

namespace py = pybind11;

namespace {

using Size = std::tuple<unsigned, unsigned, unsigned>;
dim3 to_dim3(Size s) {
  return dim3(std::get<0>(s), std::get<1>(s), std::get<2>(s));
}

void bind_jit(py::module_& m) {
  namespace jit = weft::jit;
  using NoGil = py::call_guard<py::gil_scoped_release>;
  m.def(
      "jit_compile",
      [](const std::string& source, const jit::Defines& defines, int arch) {
        jit::Origin origin;
        jit::Cubin code;
        {
          py::gil_scoped_release release;
          code = jit::cubin(source, defines, arch, &origin);
        }
        constexpr const char* kOrigins[] = {"memory", "disk", "compiled"};
        return py::make_tuple(py::bytes(code->data(), code->size()), kOrigins[int(origin)]);
      },
      "(cubin, where it came from: 'memory', 'disk' or 'compiled') of an embedded source.", py::arg("source"),
      py::arg("defines"), py::arg("arch"));
  m.def(
      "jit_compile_many",
      [](const std::vector<std::tuple<std::string, jit::Defines, int>>& requests) {
        std::vector<jit::Request> list;
        for (const auto& [source, defines, arch] : requests) list.push_back({source, defines, arch});
        jit::cubins(list);
      },
      NoGil(), "Compiles all (source, defines, arch), several at a time.", py::arg("requests"));
  m.def("jit_why_unavailable", &jit::why_unavailable, NoGil(), "Why nothing can be compiled here, or None.",
        py::arg("arch") = 0);
  m.def("jit_version", &jit::nvrtc_version, NoGil(), "NVRTC's version; only where jit_why_unavailable() is None.");
  m.def("jit_cache_dir", &jit::cache_dir, "Folder of the compiled kernels, '' where there is no place for one.");
  m.def(
      "jit_sources",
      [] {
        py::dict sources;
        for (const auto& [name, text] : jit::kSources) sources[py::str(name)] = py::bytes(text.data(), text.size());
        return sources;
      },
      "Name to text of every embedded source.");
  m.def(
      "jit_sha256", [](const std::string& bytes) { return jit::hex(jit::Sha256().update(bytes).finish()); },
      "For the tests.", py::arg("bytes"));
  m.def(
      "jit_launch",
      [](const std::string& source, const jit::Defines& defines, const std::string& entry, Size grid, Size block,
         unsigned shared_bytes, unsigned cluster_size, bool cooperative, uintptr_t stream,
         std::vector<long long> arguments) {
        std::vector<void*> pointers;
        for (auto& argument : arguments) pointers.push_back(&argument);
        jit::kernel(source, defines, entry.c_str())
            .launch(to_dim3(grid), to_dim3(block), shared_bytes, cluster_size, cooperative,
                    reinterpret_cast<cudaStream_t>(stream), pointers.data());
      },
      NoGil(), "Launches a kernel whose parameters are all 64 bits wide on the current device. For the tests.",
      py::arg("source"), py::arg("defines"), py::arg("entry"), py::arg("grid"), py::arg("block"),
      py::arg("shared_bytes"), py::arg("cluster_size"), py::arg("cooperative"), py::arg("stream"),
      py::arg("arguments"));
  m.def(
      "jit_limits",
      [](const std::string& source, const jit::Defines& defines, const std::string& entry, Size block,
         unsigned shared_bytes, unsigned cluster_size) {
        jit::Kernel& kernel = jit::kernel(source, defines, entry.c_str());
        py::gil_scoped_acquire acquire;
        py::dict facts;
        facts["registers"] = kernel.registers();
        facts["local_bytes"] = kernel.local_bytes();
        facts["static_shared_bytes"] = kernel.static_shared_bytes();
        facts["max_threads"] = kernel.max_threads();
        facts["sm_count"] = kernel.sm_count();
        facts["max_active_blocks_per_sm"] = kernel.max_active_blocks_per_sm(to_dim3(block), shared_bytes);
        facts["max_active_clusters"] = kernel.max_active_clusters(to_dim3(block), shared_bytes, cluster_size);
        return facts;
      },
      NoGil(), "What a kernel takes and how much of it the current device holds at once.", py::arg("source"),
      py::arg("defines"), py::arg("entry"), py::arg("block"), py::arg("shared_bytes"), py::arg("cluster_size"));
}

void bind_rnn(py::module_& m) {
  m.def(
      "rnn_plan",
      [](int device, const std::string& cell, const std::string& dtype, int64_t input_size, int64_t hidden_size,
         int layers, int directions, int64_t steps, int64_t batch, bool packed, bool trains) {
        weft::RnnPlanReport report;
        {
          py::gil_scoped_release release;
          report = weft::rnn_plan_report(
              device, {cell, dtype, steps, batch, input_size, hidden_size, layers, directions, packed, trains});
        }
        py::dict facts;
        facts["why_not"] = report.why_not.empty() ? py::object(py::none()) : py::str(report.why_not);
        facts["forward"] = report.forward;
        facts["backward"] = report.backward;
        facts["microseconds"] =
            report.microseconds > 0 ? py::object(py::float_(report.microseconds)) : py::object(py::none());
        return facts;
      },
      "How weft::rnn runs on a GPU: why it has no kernel, or None; how the recurrences are laid out; the microseconds "
      "expected.",
      py::arg("device"), py::arg("cell"), py::arg("dtype"), py::arg("input_size"), py::arg("hidden_size"),
      py::arg("layers"), py::arg("directions"), py::arg("steps"), py::arg("batch"), py::arg("packed"),
      py::arg("trains"));
  m.def(
      "rnn_geometries",
      [](int device, const std::string& cell, const std::string& dtype, int64_t hidden, int64_t batch, int directions,
         bool packed, bool backward) {
        py::list list;
        for (const auto& g :
             weft::rnn_geometries(device, {cell, dtype, 1, batch, 1, hidden, 1, directions, packed, true}, backward)) {
          py::dict amounts;
          for (const auto& [name, amount] : g.amounts) amounts[py::str(name)] = amount;
          list.append(py::make_tuple(g.text, g.defines, g.step_us, g.launches, amounts));
        }
        return list;
      },
      "(text for WEFT_RNN_GEOMETRY, macros, expected microseconds of a step, launches of the kernel, amount of each "
      "cost in a step of one) of each geometry that fits.",
      py::arg("device"), py::arg("cell"), py::arg("dtype"), py::arg("hidden"), py::arg("batch"), py::arg("directions"),
      py::arg("packed"), py::arg("backward"));
}

}  // namespace
#endif

PYBIND11_MODULE(_C, m) {
  m.doc() = "Weft's compiled operators; use them through torch.ops.weft or the weft package.";
#ifdef WEFT_WITH_CUDA
  m.attr("with_cuda") = true;
  bind_jit(m);
  bind_rnn(m);
#else
  m.attr("with_cuda") = false;
#endif
}
