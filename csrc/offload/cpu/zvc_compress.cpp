// zvc_compress and zvc_decompress on the CPU: chunks, and the registration. The work is in zvc_kernels-inl.h.
#include "offload/zvc_compress.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#include "common/check.h"
#include "common/integers.h"
#include "common/tensor.h"
#include "offload/cpu/zvc_kernels.h"

namespace weft::offload {
namespace {

// Elements per task: whole mask words, and enough work for a thread.
constexpr int64_t kChunk = 1 << 17;

template <typename T>
const cpu::ZvcKernels<T>& kernels() {
  if constexpr (std::is_same_v<T, uint16_t>) {
    return cpu::zvc_kernels().b16;
  } else {
    return cpu::zvc_kernels().b32;
  }
}

// Calls body(chunk, begin, length) for all chunks of n elements.
template <typename Body>
void for_chunks(int64_t n, const Body& body) {
  at::parallel_for(0, ceil_div(n, kChunk), 1, [&](int64_t first, int64_t last) {
    for (int64_t c = first; c < last; ++c) body(c, c * kChunk, std::min(kChunk, n - c * kChunk));
  });
}

// Replaces counts by their exclusive prefix sums and returns the total.
int64_t exclusive_sum(std::vector<int64_t>& counts) {
  int64_t sum = 0;
  for (int64_t& count : counts) {
    const int64_t here = count;
    count = sum;
    sum += here;
  }
  return sum;
}

template <typename T>
int64_t compress(const T* x, int64_t n, uint32_t* mask, T* values) {
  const auto& kernel = kernels<T>();
  std::vector<int64_t> starts(ceil_div(n, kChunk));
  for_chunks(n, [&](int64_t c, int64_t begin, int64_t length) { starts[c] = kernel.count(x + begin, length); });
  const int64_t size = exclusive_sum(starts);
  for_chunks(n, [&](int64_t c, int64_t begin, int64_t length) {
    const int64_t end = c + 1 < int64_t(starts.size()) ? starts[c + 1] : size;
    kernel.pack(x + begin, length, mask + begin / 32, values + starts[c], end - starts[c]);
  });
  return size;
}

template <typename T>
void decompress(const uint32_t* mask, int64_t n, const T* values, int64_t available, T* out) {
  std::vector<int64_t> starts(ceil_div(n, kChunk));
  // Bits past n are no elements.
  const auto word = [&](int64_t w) { return n - 32 * w < 32 ? mask[w] & ((1u << (n - 32 * w)) - 1) : mask[w]; };
  for_chunks(n, [&](int64_t c, int64_t begin, int64_t length) {
    int64_t count = 0;
    for (int64_t w = begin / 32; w < ceil_div(begin + length, 32); ++w) count += __builtin_popcount(word(w));
    starts[c] = count;
  });
  const int64_t size = exclusive_sum(starts);
  TORCH_CHECK_VALUE(available >= size, "zvc_decompress: mask has ", size, " bits set, values only ", available,
                    " elements");
  for_chunks(n, [&](int64_t c, int64_t begin, int64_t length) {
    kernels<T>().expand(mask + begin / 32, length, values + starts[c], available - starts[c], out + begin);
  });
}

at::Tensor zvc_decompress_cpu(const at::Tensor& mask, const at::Tensor& values, at::IntArrayRef shape) {
  const int64_t n = check_zvc("zvc_decompress", mask, values, shape);
  const at::Tensor words = mask.contiguous(), packed = values.contiguous();
  at::Tensor out = at::empty(shape, values.options());
  const auto run = [&](auto bits) {
    using T = decltype(bits);
    decompress(static_cast<const uint32_t*>(words.const_data_ptr()), n, static_cast<const T*>(packed.const_data_ptr()),
               packed.numel(), static_cast<T*>(out.mutable_data_ptr()));
  };
  values.element_size() == 2 ? run(uint16_t()) : run(uint32_t());
  return out;
}

}  // namespace

Compressed zvc_compress_cpu(const at::Tensor& tensor) {
  const at::Tensor x = check_compressible("zvc_compress", tensor);
  const int64_t n = x.numel();
  at::Tensor mask = at::empty({n / 32 + (n % 32 != 0)}, x.options().dtype(at::kInt));
  at::Tensor values = at::empty({n}, x.options()), size = at::empty({}, x.options().dtype(at::kLong));
  const auto run = [&](auto bits) {
    using T = decltype(bits);
    return compress(static_cast<const T*>(x.const_data_ptr()), n, static_cast<uint32_t*>(mask.mutable_data_ptr()),
                    static_cast<T*>(values.mutable_data_ptr()));
  };
  *size.mutable_data_ptr<int64_t>() = x.element_size() == 2 ? run(uint16_t()) : run(uint32_t());
  return {mask, values, size};
}

TORCH_LIBRARY_IMPL(weft, CPU, m) {
  m.impl("zvc_compress", zvc_compress_cpu);
  m.impl("zvc_decompress", zvc_decompress_cpu);
}

}  // namespace weft::offload
