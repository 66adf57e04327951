// rle_compress and rle_decompress on the CPU. Runs are read from zvc_compress's mask, a part of it per task, in two
// passes: one counts the entries of each part, one writes them. The inverse copies and clears whole runs, a part of
// them per task.
#include "offload/rle_compress.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "common/check.h"
#include "common/integers.h"
#include "common/tensor.h"
#include "offload/runs.h"

namespace weft::offload {
namespace {

constexpr int64_t kWords = 1 << 12;  // of the mask, per task
constexpr int64_t kRuns = 1 << 13;   // per task

// Calls body(part, begin, end) for all parts of `count` items.
template <typename Body>
void for_parts(int64_t count, int64_t size, const Body& body) {
  at::parallel_for(0, ceil_div(count, size), 1, [&](int64_t first, int64_t last) {
    for (int64_t p = first; p < last; ++p) body(p, p * size, std::min(count, (p + 1) * size));
  });
}

// Calls visit(place) for each change in words [begin, end).
template <typename Visit>
void for_changes(const uint32_t* mask, int64_t n, int64_t begin, int64_t end, const Visit& visit) {
  for (int64_t w = begin; w < end; ++w) {
    for (uint32_t bits = change_bits(mask[w], w > 0 ? mask[w - 1] : 0, w, n); bits != 0; bits &= bits - 1)
      visit(32 * w + __builtin_ctz(bits));
  }
}

Compressed rle_compress_cpu(const at::Tensor& tensor) {
  const at::Tensor x = check_compressible("rle_compress", tensor);
  const int64_t n = x.numel();
  const auto [words, values, values_size] = zvc_compress_cpu(x);
  at::Tensor runs = at::zeros({n + 1}, x.options().dtype(at::kInt));
  at::Tensor size = at::empty({2}, x.options().dtype(at::kLong));
  const auto* mask = static_cast<const uint32_t*>(words.const_data_ptr());
  auto* const out = runs.mutable_data_ptr<int32_t>();

  std::vector<Changes> parts(ceil_div(words.numel(), kWords));
  for_parts(words.numel(), kWords, [&](int64_t p, int64_t begin, int64_t end) {
    Changes changes;
    for_changes(mask, n, begin, end, [&](int64_t at) { changes.add(at); });
    parts[p] = changes;
  });
  Changes sum = Changes::start();
  for (Changes& part : parts) {
    const Changes here = part;
    part = sum;
    sum = sum.then(here);
  }
  for_parts(words.numel(), kWords, [&](int64_t p, int64_t begin, int64_t end) {
    int32_t* to = out + parts[p].entries;
    int64_t last = parts[p].last;
    for_changes(mask, n, begin, end, [&](int64_t at) {
      to = write_run(to, at - last);
      last = at;
    });
  });
  auto* const sizes = size.mutable_data_ptr<int64_t>();
  sizes[0] = n == 0 ? 0 : write_run(out + sum.entries, n - sum.last) - out;
  sizes[1] = *values_size.const_data_ptr<int64_t>();
  return {runs, values, size};
}

// Where a part of the runs starts, in the tensor and in the values.
struct Place {
  int64_t element = 0, value = 0;
};

at::Tensor rle_decompress_cpu(const at::Tensor& runs, const at::Tensor& values, at::IntArrayRef shape) {
  const int64_t n = check_rle("rle_decompress", runs, values, shape);
  const at::Tensor lengths = runs.contiguous(), packed = values.contiguous();
  at::Tensor out = at::empty(shape, values.options());
  const int64_t count = lengths.numel(), itemsize = packed.element_size();
  const auto* length = pointer<int32_t>(lengths);
  const auto* from = static_cast<const char*>(packed.const_data_ptr());
  auto* const to = static_cast<char*>(out.mutable_data_ptr());

  std::vector<Place> parts(ceil_div(count, kRuns));
  for_parts(count, kRuns, [&](int64_t p, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      TORCH_CHECK_VALUE(length[r] >= 0, "rle_decompress: runs must not be negative, runs[", r, "] is ", length[r]);
      parts[p].element += length[r];
      if (r % 2 == 1) parts[p].value += length[r];
    }
  });
  Place sum;
  for (Place& part : parts) {
    const Place here = part;
    part = sum;
    sum = {sum.element + here.element, sum.value + here.value};
  }
  TORCH_CHECK_VALUE(sum.element == n, "rle_decompress: runs must make up the ", n, " elements of shape ", shape,
                    ", they have ", sum.element);
  TORCH_CHECK_VALUE(sum.value <= packed.numel(), "rle_decompress: runs have ", sum.value, " values, values only ",
                    packed.numel(), " elements");
  for_parts(count, kRuns, [&](int64_t p, int64_t begin, int64_t end) {
    Place at = parts[p];
    for (int64_t r = begin; r < end; ++r) {
      if (length[r] == 0) continue;
      const size_t bytes = size_t(length[r]) * itemsize;
      if (r % 2 == 1) {
        std::memcpy(to + at.element * itemsize, from + at.value * itemsize, bytes);
        at.value += length[r];
      } else {
        std::memset(to + at.element * itemsize, 0, bytes);
      }
      at.element += length[r];
    }
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CPU, m) {
  m.impl("rle_compress", rle_compress_cpu);
  m.impl("rle_decompress", rle_decompress_cpu);
}

}  // namespace weft::offload
