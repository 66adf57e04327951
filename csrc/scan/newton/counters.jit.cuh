// How kernels fill the statistics of a run (scan/newton/report.h): numbers that are not negative, of 64 bits, as the
// steps of a long sequence that are walked again, in all its chunks and rounds, are more than 2^31.
#pragma once

namespace weft::scan {

template <typename Count>
__device__ __forceinline__ void add_count(Count* to, Count x) {
  atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(x));
}
template <typename Count>
__device__ __forceinline__ void raise_count(Count* to, Count x) {
  atomicMax(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(x));
}

}  // namespace weft::scan
