// What the sparse room's CPU kernels share: element types, and threads over samples and rows.
#pragma once
#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <type_traits>

#include "sparse/types.h"

namespace weft::sparse {

template <typename T>
using Accumulate = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Calls f with null pointers of the index and the element type.
template <typename F>
void dispatch(bool wide, DType dtype, F&& f) {
  with_index(wide, [&](auto* i) { with_element<c10::Half, c10::BFloat16>(dtype, [&](auto* t) { f(i, t); }); });
}

constexpr int64_t kGrain = 1 << 14;  // operations that are worth a thread

// f(sample, begin, end) for tiles of [0, count), all samples of a tile one after the other, so that what they share of
// it stays in the cache; a sample has `work` operations.
template <typename F>
void over_tiles(int64_t batch, int64_t count, int64_t tile, int64_t work, F&& f) {
  const int64_t tiles = (count + tile - 1) / tile;
  const int64_t grain = std::max<int64_t>(1, kGrain * tiles / std::max<int64_t>(work, 1));
  at::parallel_for(0, tiles * batch, grain, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) {
      const int64_t first = at / batch * tile;
      f(at % batch, first, std::min(count, first + tile));
    }
  });
}

// f(sample, first row, end) for parts of batch * rows, whose samples have `work` operations each.
template <typename F>
void over_rows(int64_t batch, int64_t rows, int64_t work, F&& f) {
  if (rows == 0) return;
  const int64_t grain = std::max<int64_t>(1, kGrain * rows / std::max<int64_t>(work, 1));
  at::parallel_for(0, batch * rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end;) {
      const int64_t sample = at / rows, row = at % rows, stop = std::min(rows, row + end - at);
      f(sample, row, stop);
      at += stop - row;
    }
  });
}

}  // namespace weft::sparse
