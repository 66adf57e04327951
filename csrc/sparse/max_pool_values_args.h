// What the kernels of max_pool_values.h take, and how a window's element is picked. Torch-free.
#pragma once
#include "common/host_device.h"
#include "sparse/types.h"

namespace weft::sparse {

struct MaxPool {
  DType dtype;
  const int32_t *crow, *col;  // of one channel: where each input position begins, and the window of each element
  int64_t planes, elements;   // samples times channels; elements of one channel
  int height, width, output_height, output_width;
  int kernel[2], stride[2], padding[2], dilation[2];
  const void* in;
  void* out;
};

// Writes a window's elements: 1 at the input position that torch's max-pooling picks, the first of the largest, but the
// last NaN, 0 at the others. read(i) is the number at position i; write(e, x) sets element e of the channel. Each
// element is of one window and one position, so that all windows together write every element once.
template <typename F, typename G>
WEFT_HOST_DEVICE inline void pool(const MaxPool& m, int window, F&& read, G&& write) {
  // A dilation may be far beyond the input.
  int64_t begin[2] = {int64_t(window / m.output_width) * m.stride[0] - m.padding[0],
                      int64_t(window % m.output_width) * m.stride[1] - m.padding[1]};
  const int64_t sizes[2] = {m.height, m.width};
  int64_t end[2];
  for (int d = 0; d < 2; ++d) {
    end[d] = begin[d] + int64_t(m.kernel[d] - 1) * m.dilation[d] + 1;
    if (end[d] > sizes[d]) end[d] = sizes[d];
    while (begin[d] < 0) begin[d] += m.dilation[d];
  }
  int64_t picked = begin[0] * m.width + begin[1];
  auto most = read(picked);
  for (int64_t h = begin[0]; h < end[0]; h += m.dilation[0]) {
    for (int64_t w = begin[1]; w < end[1]; w += m.dilation[1]) {
      const auto value = read(h * m.width + w);
      if (value > most || value != value) picked = h * m.width + w, most = value;
    }
  }
  for (int64_t h = begin[0]; h < end[0]; h += m.dilation[0]) {
    for (int64_t w = begin[1]; w < end[1]; w += m.dilation[1]) {
      const int64_t position = h * m.width + w;
      int e = m.crow[position];
      while (m.col[e] != window) ++e;
      write(e, position == picked);
    }
  }
}

}  // namespace weft::sparse
