// Kernels that show that this machine compiles, loads and launches: plain, in clusters, cooperatively. Each computes
// what comes out right only where the launch was what it was meant to be. Their parameters are 64 bits wide.
//   PROBE_FACTOR  a factor of all that is written, 1 by default
#include "common/cuda/ptx.jit.cuh"

#ifndef PROBE_FACTOR
#define PROBE_FACTOR 1
#endif

namespace {

constexpr long long kFactor = PROBE_FACTOR;
namespace cluster = weft::cluster;

}  // namespace

// out[i] = value + i.
extern "C" __global__ void probe_fill(long long* out, long long n, long long value) {
  const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = kFactor * (value + i);
}

// out[block] = index of the next block of its cluster, read from the last word of that block's dynamic shared memory,
// of which there are shared_bytes.
extern "C" __global__ void probe_cluster(long long* out, long long shared_bytes) {
  extern __shared__ unsigned words[];
  unsigned* last = words + shared_bytes / 4 - 1;
  if (threadIdx.x == 0) *last = blockIdx.x;
  cluster::barrier();
  const unsigned neighbour =
      cluster::load(cluster::address_in((cluster::rank() + 1) % cluster::size(), weft::shared_address(last)));
  if (threadIdx.x == 0) out[blockIdx.x] = kFactor * neighbour;
  cluster::barrier();  // a block must not leave while another reads its memory
}

// out[block] = number of blocks that have arrived at *counter (0 before the launch) when the block goes on, which is
// all of them: every block waits for all others, so all must be resident.
extern "C" __global__ void probe_grid(long long* out, unsigned long long* counter) {
  if (threadIdx.x != 0) return;
  atomicAdd(counter, 1ull);
  unsigned long long arrived = 0;
  do {
    arrived = *(volatile unsigned long long*)counter;
  } while (arrived < gridDim.x);
  out[blockIdx.x] = kFactor * (long long)arrived;
}
