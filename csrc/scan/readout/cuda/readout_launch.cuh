// Launches of linear_scan_readout for one element type. What the kernels do is in readout_walk.cuh.
#pragma once
#include "common/integers.h"
#include "common/launch.cuh"
#include "scan/readout/cuda/readout_types.h"
#include "scan/readout/cuda/readout_walk.cuh"

namespace weft::scan {
namespace {

constexpr int kReadOutWarps = 4;  // of a block, forward

template <typename T, Reads kReads>
__global__ void __launch_bounds__(32 * kReadOutWarps)
    readout_kernel(const __grid_constant__ ReadOut s, int log, bool whole) {
  run_readout<T, kReads>(s, log, whole, blockIdx.x * int64_t(kReadOutWarps) + threadIdx.x / 32);
}

template <typename T, Reads kReads>
__global__ void __launch_bounds__(32)
    readout_gradients_kernel(const __grid_constant__ ReadOutGradients g, int log, bool whole) {
  extern __shared__ __align__(128) unsigned char memory[];
  run_readout_gradients<T, kReads>(g, log, whole, blockIdx.x, memory);
}

// log2 of the lanes of a channel.
int lanes_log(const ReadOut& s) {
  int log = 0;
  while ((int64_t(kReadOutStates) << log) < s.N) ++log;
  return log;
}

template <typename T>
bool loads_whole(const ReadOut& s) {
  const int64_t bytes = 4 * int64_t(sizeof(T)) < 16 ? 4 * int64_t(sizeof(T)) : 16;
  auto fits = [&](const Field& f) {
    return f.at == nullptr ||
           (reinterpret_cast<uintptr_t>(f.at) % bytes == 0 && f.t * int64_t(sizeof(T)) % bytes == 0 &&
            f.b * int64_t(sizeof(T)) % bytes == 0 && f.h * int64_t(sizeof(T)) % bytes == 0);
  };
  return s.N % kReadOutStates == 0 && fits(s.A) && fits(s.c) && fits(s.x0) && (!s.full || fits(s.b));
}

// Runs f for what is read at every step; `each`: gradients of A or c of every step are asked for.
template <typename F>
void by_reads(const ReadOut& s, bool each, F f) {
  if (each || s.A.t != 0 || s.c.t != 0) return f(std::integral_constant<Reads, Reads::kEach>{});
  if (s.full) return f(std::integral_constant<Reads, Reads::kFull>{});
  f(std::integral_constant<Reads, Reads::kOne>{});
}

int64_t warps_of(const ReadOut& s, int log) {
  return ceil_div(s.B * s.H, int64_t(32 >> log));
}

template <typename T>
void launch_readout(const ReadOut& s, cudaStream_t stream) {
  const int log = lanes_log(s);
  by_reads(s, false, [&](auto reads) {
    launch("linear_scan_readout", readout_kernel<T, decltype(reads)::value>,
           Grid(ceil_div(warps_of(s, log), int64_t(kReadOutWarps))), dim3(32 * kReadOutWarps), 0, stream, s, log,
           loads_whole<T>(s));
  });
}

template <typename T>
void launch_readout_gradients(const ReadOutGradients& g, cudaStream_t stream) {
  const int log = lanes_log(g.scan);
  by_reads(g.scan, (g.A.at != nullptr && !g.sum_A) || (g.c.at != nullptr && !g.sum_c), [&](auto reads) {
    constexpr Reads kReads = decltype(reads)::value;
    launch("linear_scan_readout_gradients", readout_gradients_kernel<T, kReads>, Grid(warps_of(g.scan, log)), dim3(32),
           size_t(ReadOutShape<T, kReads>::kSharedBytes), stream, g, log, loads_whole<T>(g.scan));
  });
}

}  // namespace
}  // namespace weft::scan
