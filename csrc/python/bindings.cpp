// The Python module weft._C: loading it registers the operators; pybind11 carries only what is not a tensor.
#include <pybind11/pybind11.h>

PYBIND11_MODULE(_C, m) {
  m.doc() = "Weft's compiled operators; use them through torch.ops.weft or the weft package.";
#ifdef WEFT_WITH_CUDA
  m.attr("with_cuda") = true;
#else
  m.attr("with_cuda") = false;
#endif
}
