// CPU kernel of max_pool_values: threads over channels of samples.
#include "sparse/max_pool_values.h"

#include "sparse/cpu/parallel.h"

namespace weft::sparse {

void max_pool_values_cpu(const MaxPool& m) {
  with_element<c10::Half, c10::BFloat16>(m.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const int64_t windows = int64_t(m.output_height) * m.output_width;
    const int64_t work = 2 * windows * m.kernel[0] * m.kernel[1];
    over_rows(m.planes, windows, work, [&](int64_t plane, int64_t begin, int64_t end) {
      const T* in = static_cast<const T*>(m.in) + plane * m.height * m.width;
      T* out = static_cast<T*>(m.out) + plane * m.elements;
      const auto read = [&](int i) { return Accumulate<T>(in[i]); };
      const auto write = [&](int e, bool picked) { out[e] = T(picked ? 1 : 0); };
      for (int64_t q = begin; q < end; ++q) pool(m, int(q), read, write);
    });
  });
}

}  // namespace weft::sparse
