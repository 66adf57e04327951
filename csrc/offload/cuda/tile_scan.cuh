// A scan of many items by tiles, one block each, in three launches: the sum of each tile, the prefix sums of tiles, and
// a second pass over the items. Reads its items twice: meant for work that is not time-critical.
//
// Op: a type Value; int64_t items; static Value none() and static Value both(a, b), a monoid, not necessarily
// commutative; Value start(), before all items; Value item(i); void apply(i, Value before); void finish(Value all).
#pragma once
#include <cstdint>

#include "common/integers.h"
#include "common/launch.cuh"

namespace weft::offload {

constexpr int kScanBlock = 256, kScanItems = 8, kScanTile = kScanBlock * kScanItems, kScanParts = 1024;

// The sum of the values of the threads before this one; all kThreads of the block call it.
template <typename Op, int kThreads>
__device__ typename Op::Value sum_before(const typename Op::Value& own) {
  using Value = typename Op::Value;
  alignas(16) __shared__ unsigned char memory[kThreads * sizeof(Value)];
  auto* const sums = reinterpret_cast<Value*>(memory);
  const int thread = int(threadIdx.x);
  sums[thread] = own;
  __syncthreads();
  for (int d = 1; d < kThreads; d *= 2) {
    const Value other = thread >= d ? sums[thread - d] : Op::none();
    __syncthreads();
    sums[thread] = Op::both(other, sums[thread]);
    __syncthreads();
  }
  const Value before = thread > 0 ? sums[thread - 1] : Op::none();
  __syncthreads();
  return before;
}

template <typename Op>
__device__ typename Op::Value own_items(const Op& op, int64_t first) {
  typename Op::Value sum = Op::none();
  for (int64_t i = first; i < first + kScanItems && i < op.items; ++i) sum = Op::both(sum, op.item(i));
  return sum;
}

template <typename Op>
__global__ void __launch_bounds__(kScanBlock) scan_sums_kernel(Op op, typename Op::Value* parts) {
  const auto own = own_items(op, blockIdx.x * int64_t(kScanTile) + threadIdx.x * kScanItems);
  const auto before = sum_before<Op, kScanBlock>(own);
  if (threadIdx.x == kScanBlock - 1) parts[blockIdx.x] = Op::both(before, own);
}

template <typename Op>
__global__ void __launch_bounds__(kScanParts) scan_parts_kernel(Op op, typename Op::Value* parts, int64_t count) {
  using Value = typename Op::Value;
  const int64_t share = ceil_div(count, kScanParts), begin = min(threadIdx.x * share, count);
  const int64_t end = min(begin + share, count);
  Value own = Op::none();
  for (int64_t p = begin; p < end; ++p) own = Op::both(own, parts[p]);
  Value before = Op::both(op.start(), sum_before<Op, kScanParts>(own));
  for (int64_t p = begin; p < end; ++p) {
    const Value part = parts[p];
    parts[p] = before;
    before = Op::both(before, part);
  }
  if (threadIdx.x == kScanParts - 1) op.finish(before);
}

template <typename Op>
__global__ void __launch_bounds__(kScanBlock) scan_apply_kernel(Op op, const typename Op::Value* parts) {
  const int64_t first = blockIdx.x * int64_t(kScanTile) + threadIdx.x * kScanItems;
  auto before = Op::both(parts[blockIdx.x], sum_before<Op, kScanBlock>(own_items(op, first)));
  for (int64_t i = first; i < first + kScanItems && i < op.items; ++i) {
    const auto item = op.item(i);  // apply may change what it is read from
    op.apply(i, before);
    before = Op::both(before, item);
  }
}

template <typename Op>
size_t tile_scan_workspace(int64_t items) {
  return size_t(ceil_div(items, kScanTile)) * sizeof(typename Op::Value);
}

template <typename Op>
void tile_scan(const char* name, const Op& op, void* workspace, cudaStream_t stream) {
  auto* const parts = static_cast<typename Op::Value*>(workspace);
  const int64_t tiles = ceil_div(op.items, kScanTile);
  launch(name, scan_sums_kernel<Op>, tiles, kScanBlock, 0, stream, op, parts);
  launch(name, scan_parts_kernel<Op>, 1, kScanParts, 0, stream, op, parts, tiles);
  launch(name, scan_apply_kernel<Op>, tiles, kScanBlock, 0, stream, op, parts);
}

}  // namespace weft::offload
