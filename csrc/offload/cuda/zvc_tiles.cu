// Launches of zero-value compression; what the kernels do is in zvc_tiles.cuh.
#include "offload/cuda/zvc_tiles.cuh"

#include <algorithm>

#include "common/launch.cuh"

namespace weft::offload {
namespace {

constexpr int kCompressBlocks = 2, kDecompressBlocks = 4;  // per SM
constexpr int kScanThreads = 1024;

int64_t grid(int64_t tiles, int blocks, int per_sm) {
  return std::min<int64_t>(tiles, blocks > 0 ? blocks : per_sm * device_limits().sm_count);
}

template <int kItem>
__global__ void __launch_bounds__(kThreads + kWarp, kCompressBlocks)
    compress_kernel(ZvcCompress args, uint64_t* workspace) {
  extern __shared__ uint4 memory[];
  compress_tiles<kItem>(args, workspace, *reinterpret_cast<CompressShared*>(memory));
}

template <int kItem>
__global__ void __launch_bounds__(SpreadTile<kItem>::kThreads)
    count_kernel(ZvcDecompress args, int* starts, int64_t* totals) {
  __shared__ int counts[kGroup];
  count_tiles<kItem>(args, blockIdx.x, starts, totals, counts);
}

// Replaces counts by the sums of those before them; one block, in which every thread sums up a part in order.
__global__ void __launch_bounds__(kScanThreads) scan_kernel(int64_t* counts, int64_t length) {
  __shared__ int64_t sums[kScanThreads];
  const int64_t part = ceil_div(length, kScanThreads), begin = min(threadIdx.x * part, length);
  const int64_t end = min(begin + part, length);
  int64_t sum = 0;
  for (int64_t i = begin; i < end; ++i) sum += counts[i];
  sums[threadIdx.x] = sum;
  __syncthreads();
  for (int d = 1; d < kScanThreads; d *= 2) {
    const int64_t other = threadIdx.x >= d ? sums[threadIdx.x - d] : 0;
    __syncthreads();
    sums[threadIdx.x] += other;
    __syncthreads();
  }
  int64_t before = sums[threadIdx.x] - sum;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t count = counts[i];
    counts[i] = before;
    before += count;
  }
}

template <int kItem>
__global__ void __launch_bounds__(SpreadTile<kItem>::kThreads, kDecompressBlocks)
    decompress_kernel(ZvcDecompress args, const int* starts, const int64_t* totals) {
  extern __shared__ uint4 memory[];
  decompress_tiles<kItem>(args, blockIdx.x, gridDim.x, starts, totals, *reinterpret_cast<DecompressShared*>(memory));
}

struct DecompressWorkspace {
  int64_t tiles, groups;
  explicit DecompressWorkspace(const ZvcDecompress& args)
      : tiles(tiles_of<kSpreadWarps>(args.n, args.itemsize)), groups(ceil_div(tiles, kGroup)) {}
  size_t bytes() const { return size_t(groups) * sizeof(int64_t) + size_t(tiles) * sizeof(int); }
};

template <int kItem>
void compress(const ZvcCompress& args, void* workspace, int blocks, cudaStream_t stream) {
  launch("zvc_compress", compress_kernel<kItem>, grid(tiles_of<kPackWarps>(args.n, kItem), blocks, kCompressBlocks),
         kThreads + kWarp, sizeof(CompressShared), stream, args, static_cast<uint64_t*>(workspace));
}

template <int kItem>
void decompress(const ZvcDecompress& args, void* workspace, int blocks, cudaStream_t stream) {
  const DecompressWorkspace sizes(args);
  auto* const totals = static_cast<int64_t*>(workspace);
  auto* const starts = reinterpret_cast<int*>(totals + sizes.groups);
  launch("zvc_decompress (counts)", count_kernel<kItem>, sizes.groups, SpreadTile<kItem>::kThreads, 0, stream, args,
         starts, totals);
  launch("zvc_decompress (starts)", scan_kernel, 1, kScanThreads, 0, stream, totals, sizes.groups);
  launch("zvc_decompress", decompress_kernel<kItem>, grid(sizes.tiles, blocks, kDecompressBlocks),
         SpreadTile<kItem>::kThreads, sizeof(DecompressShared), stream, args, starts, totals);
}

}  // namespace

size_t zvc_compress_workspace(const ZvcCompress& args) {
  return sizeof(uint64_t) * size_t(kStatuses + tiles_of<kPackWarps>(args.n, args.itemsize));
}

void zvc_compress(const ZvcCompress& args, void* workspace, int blocks, cudaStream_t stream) {
  if (args.n == 0) {
    cuda_check(cudaMemsetAsync(args.size, 0, sizeof(int64_t), stream), "zvc_compress: size");
    return;
  }
  cuda_check(cudaMemsetAsync(workspace, 0, zvc_compress_workspace(args), stream), "zvc_compress: workspace");
  args.itemsize == 2 ? compress<2>(args, workspace, blocks, stream) : compress<4>(args, workspace, blocks, stream);
}

size_t zvc_decompress_workspace(const ZvcDecompress& args) {
  return DecompressWorkspace(args).bytes();
}

void zvc_decompress(const ZvcDecompress& args, void* workspace, int blocks, cudaStream_t stream) {
  if (args.n == 0) return;
  args.itemsize == 2 ? decompress<2>(args, workspace, blocks, stream) : decompress<4>(args, workspace, blocks, stream);
}

}  // namespace weft::offload
