// CPU kernels of conv_pattern, conv_values and conv_values_backward: threads over rows, and over weights.
#include "sparse/conv_values.h"

#include "sparse/cpu/parallel.h"

namespace weft::sparse {
namespace {

// f(channel, position, first, elements of one output channel, where the row begins)
template <typename F>
void each_row(const Conv& c, F&& f) {
  const int64_t channels = c.groups * c.in_channels;
  over_rows(channels, c.positions, c.out_channels * c.elements + c.positions,
            [&](int64_t channel, int64_t begin, int64_t end) {
              const int64_t base = channel * c.out_channels * c.elements;
              for (int64_t p = begin; p < end; ++p) {
                const int64_t first = c.crow[p];
                f(channel, p, first, c.crow[p + 1] - first, base + c.out_channels * first);
              }
            });
}

template <typename I>
void pattern(const Conv& c) {
  I *crow = static_cast<I*>(c.out_crow), *col = static_cast<I*>(c.out);
  each_row(c, [&](int64_t channel, int64_t p, int64_t first, int64_t n, int64_t begin) {
    crow[channel * c.positions + p] = I(begin);
    const int64_t group = channel / c.in_channels;
    for (int64_t co = 0; co < c.out_channels; ++co) {
      const int64_t plane = (group * c.out_channels + co) * c.output_positions;
      for (int64_t t = 0; t < n; ++t) col[begin + co * n + t] = I(plane + c.col[first + t]);
    }
  });
  crow[c.groups * c.in_channels * c.positions] = I(c.groups * c.in_channels * c.out_channels * c.elements);
}

template <typename T>
void values(const Conv& c) {
  using Acc = Accumulate<T>;
  const T* weight = static_cast<const T*>(c.in);
  T* out = static_cast<T*>(c.out);
  each_row(c, [&](int64_t channel, int64_t, int64_t first, int64_t n, int64_t begin) {
    const int64_t group = channel / c.in_channels, ci = channel % c.in_channels;
    for (int64_t co = 0; co < c.out_channels; ++co) {
      const T* w = weight + ((group * c.out_channels + co) * c.in_channels + ci) * c.kernel;
      for (int64_t t = 0; t < n; ++t) {
        const int32_t from = c.tap_crow[first + t], to = c.tap_crow[first + t + 1];
        if (to - from == 1) {  // bit for bit, whatever it is
          out[begin + co * n + t] = w[c.taps[from]];
          continue;
        }
        Acc sum = 0;
        for (int32_t s = from; s < to; ++s) sum += Acc(w[c.taps[s]]);
        out[begin + co * n + t] = T(sum);
      }
    }
  });
}

template <typename T>
void backward(const Conv& c) {
  using Acc = Accumulate<T>;
  const T* grad = static_cast<const T*>(c.in);
  T* out = static_cast<T*>(c.out);
  over_rows(c.groups * c.out_channels, c.in_channels * c.kernel, c.in_channels * (c.elements + c.kernel),
            [&](int64_t channel, int64_t begin, int64_t end) {
              const int64_t group = channel / c.out_channels, co = channel % c.out_channels;
              for (int64_t at = begin; at < end; ++at) {
                const int64_t ci = at / c.kernel, tap = at % c.kernel;
                const T* g = grad + (group * c.in_channels + ci) * c.out_channels * c.elements;
                Acc sum = 0;
                for (int32_t s = c.tap_crow_t[tap]; s < c.tap_crow_t[tap + 1]; ++s) {
                  const int64_t w = c.taps_t[s], first = c.crow[c.row[w]], n = c.crow[c.row[w] + 1] - first;
                  sum += Acc(g[c.out_channels * first + co * n + w - first]);
                }
                out[(channel * c.in_channels + ci) * c.kernel + tap] = T(sum);
              }
            });
}

}  // namespace

void conv_pattern_cpu(const Conv& c) {
  with_index(c.wide, [&](auto* i) { pattern<std::remove_pointer_t<decltype(i)>>(c); });
}

void conv_values_cpu(const Conv& c) {
  with_element<c10::Half, c10::BFloat16>(c.dtype, [&](auto* t) { values<std::remove_pointer_t<decltype(t)>>(c); });
}

void conv_values_backward_cpu(const Conv& c) {
  with_element<c10::Half, c10::BFloat16>(c.dtype, [&](auto* t) { backward<std::remove_pointer_t<decltype(t)>>(c); });
}

}  // namespace weft::sparse
