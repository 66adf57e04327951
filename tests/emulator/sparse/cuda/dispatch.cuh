// csrc/sparse/cuda/dispatch.cuh on a processor: float with int32 and double with int64 alone, because each pair is all
// kernels again for the compiler.
#pragma once
#include "emulator.h"
#define dispatch dispatch_any
#include_next "sparse/cuda/dispatch.cuh"
#undef dispatch

namespace weft::sparse {

template <typename F>
void dispatch(bool wide, DType dtype, F&& f) {
  if (dtype != (wide ? DType::f64 : DType::f32)) emulator::fail("an index of the other element type");
  if (wide) return f(static_cast<int64_t*>(nullptr), static_cast<double*>(nullptr));
  f(static_cast<int32_t*>(nullptr), static_cast<float*>(nullptr));
}

}  // namespace weft::sparse
