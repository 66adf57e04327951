// linear_scan as the fit of its costs and tests see it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <stdexcept>
#include <string>
#include <tuple>
#ifdef WEFT_WITH_CUDA
#include "scan/linear/cuda/linear_scan.h"
#endif

namespace py = pybind11;

namespace weft::scan {

void bind([[maybe_unused]] py::module_& m) {
#ifdef WEFT_WITH_CUDA
  m.def(
      "linear_scan_expected",
      [](int device, bool half, int64_t steps, int64_t batch, int64_t hidden) {
        if (hidden < 1 || hidden > kBlockMaxH) throw std::invalid_argument("hidden must be 1 to 128");
        const Expected expected = linear_scan_expected(device, half ? DType::f16 : DType::f32, steps, batch, hidden);
        const Stages& s = expected.stages;
        return std::make_tuple(expected.chunks, std::array{s.launches, s.products, s.boundaries, s.replay});
      },
      "Chunks of a dense linear_scan in float16 or float32 on a GPU, and the microseconds that its launches, products, "
      "boundaries and replay are expected to take.",
      py::arg("device"), py::arg("half"), py::arg("steps"), py::arg("batch"), py::arg("hidden"));
#endif
}

}  // namespace weft::scan
