// The kernels of csrc/sparse/cuda, one file of them a library: SOURCE 0 csr_matmul, 1 csr_mm, 2 csr_chain, 3
// conv_values, 4 max_pool_values.
#include "common/launch.cuh"
#include "emulator.h"
#include "shuffle.h"

inline double __shfl_xor_sync(unsigned, double x, int lanes) {
  return shuffled(x, emulator::current->lane ^ lanes);
}
inline int __popc(unsigned x) {
  return __builtin_popcount(x);
}
template <typename T>
T __ldcg(const T* p) {
  return *p;
}
template <typename T>
void __stcs(T* p, T x) {
  *p = x;
}
// Blocks run one after the other, so that what is static is a block's own.
#define __shared__
#define __align__(bytes) __attribute__((aligned(bytes)))

#if SOURCE == 0
#include "sparse/cuda/csr_matmul_kernels.cu"
#elif SOURCE == 1
#include "sparse/cuda/csr_mm_kernels.cu"
#elif SOURCE == 2
#include "sparse/cuda/csr_chain_kernels.cu"
#elif SOURCE == 3
#include "sparse/cuda/conv_values_kernels.cu"
#else
#include "sparse/cuda/max_pool_values_kernels.cu"
#endif

using namespace weft::sparse;

#if SOURCE == 0
// which: 0 the product, 1 and 2 its gradients. sizes: batch, rows, inner, nnz of a, b and the product, rows or elements
// of each kind, gathered products, the operands' batch strides, rows that share lists, pieces, their segments.
// pointers: as in CsrMatmul.
extern "C" void run(int which, int f64, int wide, int shared, const int64_t* sizes, void* const* pointers) {
  CsrMatmul m{};
  m.dtype = f64 ? weft::DType::f64 : weft::DType::f32, m.wide = wide, m.shared = shared;
  int64_t* const into[] = {&m.batch,        &m.rows,      &m.inner,           &m.a_nnz,           &m.b_nnz,
                           &m.c_nnz,        &m.axpy_rows, &m.accumulate_rows, &m.gather_elements, &m.gather_products,
                           &m.x_batch,      &m.y_batch,   &m.g_batch,         &m.gather_rows,     &m.piece_count,
                           &m.segment_count};
  for (int64_t* size : into) *size = *sizes++;
  const void** const to[] = {&m.a_crow,       &m.a_col,      &m.b_crow, &m.b_col,   &m.c_crow, &m.c_col,
                             &m.axpy,         &m.accumulate, &m.gather, &m.starts,  &m.left,   &m.right,
                             &m.shared_lists, &m.expand,     &m.pieces, &m.segments};
  for (const void** pointer : to) *pointer = *pointers++;
  m.lists = static_cast<const int16_t*>(*pointers++), m.narrow = *pointers++;
  for (const void** pointer : {&m.t_crow, &m.t_col, &m.t_index, &m.x, &m.y, &m.g}) *pointer = *pointers++;
  m.out = *pointers;
  (which == 0 ? csr_matmul_cuda : which == 1 ? csr_matmul_left_cuda : csr_matmul_right_cuda)(m, nullptr);
}
#elif SOURCE == 1
// which: 0 J x, 1 the sampled product. sizes: batch, rows, columns, k, nnz, batch strides of both operands.
extern "C" void run(int which, int f64, int wide, int shared, const int64_t* s, void* const* p) {
  const weft::DType dtype = f64 ? weft::DType::f64 : weft::DType::f32;
  if (which == 0) {
    csr_mm_cuda({dtype, wide != 0, s[0], s[1], s[2], s[3], s[4], p[0], p[1], p[2], p[3], s[5], p[4], s[6], p[5]},
                nullptr);
  } else {
    csr_sampled_mm_cuda(
        {dtype, wide != 0, shared != 0, s[0], s[1], s[2], s[3], s[4], p[0], p[1], p[3], p[4], s[5], s[6], p[5]},
        nullptr);
  }
}
#elif SOURCE == 2
// `which` links, in clusters or not. sizes: batch, then values' batch stride, rows, columns, nnz, reads of each.
// pointers: crow, col, values, x, out, source of each.
extern "C" void run(int which, int f64, int wide, int clusters, const int64_t* s, void* const* p) {
  std::vector<CsrLink> links;
  for (int k = 0; k < which; ++k, p += 6) {
    const int64_t* of = s + 1 + 5 * k;
    links.push_back({p[0], p[1], p[2], p[3], p[4], p[5], of[0], of[1], of[2], of[3], of[4]});
  }
  weft::with_clusters = clusters, weft::processors = clusters ? 40 : 3;
  std::vector<std::unique_ptr<uint4[]> > held;
  const auto scratch = [&](int64_t bytes, bool zero) -> void* {
    held.emplace_back(new uint4[bytes / 16 + 1]);
    std::memset(held.back().get(), zero ? 0 : 0xff, bytes);  // NaN
    return held.back().get();
  };
  csr_chain_cuda(links.data(), which, f64 ? weft::DType::f64 : weft::DType::f32, wide, s[0], scratch, nullptr);
}
#elif SOURCE == 3
namespace weft::sparse {
namespace {
unsigned char memory[kStaged];
}
}  // namespace weft::sparse

// which: 0 the pattern, 1 values, 2 their gradient. sizes: positions, elements, kernel, groups, in_channels,
// out_channels, output_positions, joins. pointers: the seven tables, in, out, out_crow.
extern "C" void run(int which, int f64, int wide, int, const int64_t* s, void* const* p) {
  Conv c{};
  c.dtype = f64 ? weft::DType::f64 : weft::DType::f32, c.wide = wide;
  const int32_t** const tables[] = {&c.crow, &c.row, &c.col, &c.tap_crow, &c.taps, &c.tap_crow_t, &c.taps_t};
  for (int i = 0; i < 7; ++i) *tables[i] = static_cast<const int32_t*>(p[i]);
  c.positions = s[0], c.elements = s[1], c.kernel = s[2];
  c.groups = s[3], c.in_channels = s[4], c.out_channels = s[5], c.output_positions = s[6];
  c.joins = s[7];
  c.in = p[7], c.out = p[8], c.out_crow = p[9];
  (which == 0 ? conv_pattern_cuda : which == 1 ? conv_values_cuda : conv_values_backward_cuda)(c, nullptr);
}
#else
// sizes: planes, elements, height, width, those of the output; kernel, stride, padding, dilation. pointers: crow, col,
// in, out.
extern "C" void run(int, int f64, int, int, const int64_t* s, void* const* p) {
  MaxPool m{};
  m.dtype = f64 ? weft::DType::f64 : weft::DType::f32;
  m.planes = s[0], m.elements = s[1], m.height = int(s[2]), m.width = int(s[3]);
  m.output_height = int(s[4]), m.output_width = int(s[5]);
  int* const settings[] = {m.kernel, m.stride, m.padding, m.dilation};
  for (int i = 0; i < 8; ++i) settings[i / 2][i % 2] = int(s[6 + i]);
  m.crow = static_cast<const int32_t*>(p[0]), m.col = static_cast<const int32_t*>(p[1]), m.in = p[2], m.out = p[3];
  max_pool_values_cuda(m, nullptr);
}
#endif
