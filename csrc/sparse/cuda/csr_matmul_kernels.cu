// Launches of products of CSR matrices whose pattern is planned, and of their gradients. What the kernels do is in
// csr_matmul_gather.cuh, csr_matmul_rows.cuh, csr_matmul_expand.cuh and csr_matmul_gradients.cuh. No atomics: every sum
// has a fixed order.
#include "sparse/cuda/csr_matmul_kernels.h"

#include <algorithm>

#include "common/launch.cuh"
#include "sparse/cuda/csr_matmul_expand.cuh"
#include "sparse/cuda/csr_matmul_gather.cuh"
#include "sparse/cuda/csr_matmul_gradients.cuh"
#include "sparse/cuda/csr_matmul_rows.cuh"
#include "sparse/cuda/dispatch.cuh"

namespace weft::sparse {
namespace {

constexpr int kFewElements = 2, kShortRow = 128;  // of a row of a and of the product on the average, of short rows
constexpr int kFilling = 4;           // blocks of a multiprocessor, with fewer of which it waits for single loads
constexpr int kWorthwhile = 1 << 15;  // numbers of the result a multiprocessor, from which y is laid out for them

// Lanes for rows of `length` on the average.
int lanes_of(int64_t elements, int64_t rows) {
  return int(std::min<int64_t>(32, elements / std::max<int64_t>(rows, 1)));
}

template <typename I, typename T>
void matmul(CsrMatmul m, cudaStream_t stream) {
  if (m.gather_elements > 0 && !m.starts && !m.left && !m.right) {
    launch("csr_matmul_elementwise", elementwise_kernel<T>, Grid(ceil_div(m.c_nnz, kThreads * 4), most(m.batch)),
           kThreads, 0, stream, m);
  } else if (m.gather_elements > 0 || m.gather_rows > 0) {
    // Of a large product that a left operand shares: y of all samples at the end of the result, as it is wanted; then
    // all numbers before it; then those in its place.
    T* out = static_cast<T*>(m.out);
    const int64_t total = m.batch * m.c_nnz, groups = ceil_div(m.batch, kWide), laid_out = groups * kWide * m.b_nnz;
    const int64_t of_row = ceil_div(m.c_nnz, std::max<int64_t>(m.rows, 1));  // elements, on the average
    int64_t done = 0;
    if (m.x_batch == 0 && m.y_batch != 0 && !m.gather && m.batch >= kWide / 2 && m.batch <= 65535 &&
        total >= kWorthwhile * device_limits().sm_count && laid_out <= total / 4) {
      const uintptr_t end = reinterpret_cast<uintptr_t>(out + total - laid_out);
      T* beside = reinterpret_cast<T*>(end - end % alignof(Four<T>));
      launch("csr_matmul_interleave", interleave_kernel<T>, Grid(ceil_div(m.b_nnz, kThreads / 4), groups), kThreads, 0,
             stream, static_cast<const T*>(m.y), beside, m.b_nnz, m.batch);
      const int64_t limit = beside - out, elements = kThreads / (kWide / 4) * 4;
      if (m.gather_rows > 0) {
        const Grid grid(ceil_div(m.gather_rows, kWarps), most(ceil_div(of_row, 32)), groups);
        launch("csr_matmul_shared_lists_interleaved", shared_lists_interleaved_kernel<I, T>, grid, kThreads, 0, stream,
               m, static_cast<const T*>(beside), limit);
      } else {
        launch("csr_matmul_gather_interleaved", gather_interleaved_kernel<I, T>,
               Grid(ceil_div(m.gather_elements, elements), groups), kThreads, 0, stream, m,
               static_cast<const T*>(beside), limit);
      }
      const int64_t whole = limit / m.c_nnz;  // samples
      m.batch -= whole, m.y = static_cast<const T*>(m.y) + whole * m.y_batch, m.out = out + whole * m.c_nnz;
      done = limit % m.c_nnz;
    }
    const auto blocks = [&](int64_t elements) { return ceil_div(m.gather_elements, kThreads * elements); };
    const auto each = [&](auto elements, auto steps) {
      constexpr int kOwn = decltype(elements)::value;
      launch("csr_matmul_gather", gather_kernel<I, T, 1, kOwn, decltype(steps)::value>,
             Grid(blocks(kOwn), most(m.batch)), kThreads, 0, stream, m, done);
    };
    // Threads for one row, in as many turns as its length takes; blocks share them as far as that fills the device.
    const int turns = int(std::min<int64_t>(ceil_div(of_row, kRowThreads), 64));
    const int threads = int(std::min<int64_t>(ceil_div(ceil_div(of_row, turns), 32) * 32, kRowThreads));
    const auto rows = [&](auto tile, auto own) {
      constexpr int kTile = decltype(tile)::value, kOwn = decltype(own)::value;
      const int64_t blocks = ceil_div(m.gather_rows, kOwn), samples = most(ceil_div(m.batch, kTile));
      const int64_t parts = std::min<int64_t>(turns, ceil_div(4 * device_limits().sm_count, blocks * samples));
      launch("csr_matmul_shared_lists", shared_lists_kernel<I, T, kTile, kOwn>, Grid(blocks, samples, parts), threads,
             0, stream, m, done);
    };
    using One = std::integral_constant<int, 1>;
    const bool single = m.batch == 1 || done > 0;
    if (m.gather_rows > 0) {
      single ? rows(One(), std::integral_constant<int, kRows>()) : rows(std::integral_constant<int, kSamples>(), One());
    } else if (single) {
      if (!m.starts) {
        each(std::integral_constant<int, kGathers>(), One());
      } else if (2 * m.gather_products < 3 * m.gather_elements &&
                 blocks(kElements) >= kFilling * device_limits().sm_count) {
        each(std::integral_constant<int, kElements>(), One());
      } else {
        each(One(), std::integral_constant<int, kSteps>());
      }
    } else {
      launch("csr_matmul_gather", gather_kernel<I, T, kSamples, 1, 1>,
             Grid(blocks(1), most(ceil_div(m.batch, kSamples))), kThreads, 0, stream, m, done);
    }
  }
  const auto tiles = [&](int64_t blocks, int64_t samples) {
    const int64_t all = ceil_div(m.batch, samples), y = most(all);
    return Grid(blocks, y, ceil_div(all, y));
  };
  if (m.piece_count > 0) {
    const auto expand = [&](auto tile) {
      constexpr int kTile = decltype(tile)::value;
      launch("csr_matmul_expand", expand_kernel<I, T, kTile>, tiles(m.piece_count, kTile), kThreads, 0, stream, m);
    };
    m.batch == 1 ? expand(std::integral_constant<int, 1>())
                 : expand(std::integral_constant<int, 16 / sizeof(acc_t<T>)>());
  }
  // Rows of a few parts are shared among warps as far as that fills the device.
  const auto parts = [&](int64_t rows, int64_t columns) {
    const int64_t blocks = ceil_div(rows, kWarps) * m.batch, wanted = 16 * int64_t(device_limits().sm_count);
    return std::max<int64_t>(1, std::min(ceil_div(columns, kColumns), ceil_div(wanted, blocks)));
  };
  const int64_t of_row = m.c_nnz / std::max<int64_t>(m.rows, 1);
  if (m.axpy_rows > 0 && m.a_nnz <= kFewElements * m.rows && of_row <= kShortRow) {
    const int64_t rows = kThreads / kShortLanes;
    launch("csr_matmul_short_axpy", short_axpy_kernel<I, T>, Grid(ceil_div(m.axpy_rows, rows), most(m.batch)), kThreads,
           0, stream, m);
  } else if (m.axpy_rows > 0) {
    const Grid grid(ceil_div(m.axpy_rows, kWarps), most(m.batch), parts(m.axpy_rows, of_row));
    launch("csr_matmul_axpy", axpy_kernel<I, T>, grid, kThreads, 0, stream, m);
  }
  if (m.accumulate_rows > 0 && m.narrow) {
    const auto narrow = [&](auto tile) {
      constexpr int kTile = decltype(tile)::value;
      launch("csr_matmul_narrow", narrow_kernel<I, T, kTile>, tiles(ceil_div(m.accumulate_rows, kWarps), kTile),
             kThreads, 0, stream, m);
    };
    m.batch == 1 ? narrow(std::integral_constant<int, 1>()) : narrow(std::integral_constant<int, kSamples>());
  } else if (m.accumulate_rows > 0) {
    const Grid grid(ceil_div(m.accumulate_rows, kWarps), most(m.batch), parts(m.accumulate_rows, 64 * kColumns));
    launch("csr_matmul_accumulate", accumulate_kernel<I, T>, grid, kThreads, 0, stream, m);
  }
}

}  // namespace

void csr_matmul_cuda(const CsrMatmul& m, cudaStream_t stream) {
  dispatch(m.wide, m.dtype, [&](auto* i, auto* t) {
    matmul<std::remove_pointer_t<decltype(i)>, std::remove_pointer_t<decltype(t)>>(m, stream);
  });
}

void csr_matmul_left_cuda(const CsrMatmul& m, cudaStream_t stream) {
  dispatch(m.wide, m.dtype, [&](auto* i, auto* t) {
    using I = std::remove_pointer_t<decltype(i)>;
    using T = std::remove_pointer_t<decltype(t)>;
    with_lanes(lanes_of(m.b_nnz, m.inner), [&](auto lanes) {
      constexpr int kLanes = decltype(lanes)::value;
      launch("csr_matmul_left", left_kernel<I, T, kLanes>,
             Grid(ceil_div(m.a_nnz * kLanes, kThreads), m.shared ? 1 : most(m.batch)), kThreads, 0, stream, m);
    });
  });
}

void csr_matmul_right_cuda(const CsrMatmul& m, cudaStream_t stream) {
  dispatch(m.wide, m.dtype, [&](auto* i, auto* t) {
    using I = std::remove_pointer_t<decltype(i)>;
    using T = std::remove_pointer_t<decltype(t)>;
    with_lanes(lanes_of(m.a_nnz, m.inner), [&](auto lanes) {
      constexpr int kLanes = decltype(lanes)::value;
      launch("csr_matmul_right", right_kernel<I, T, kLanes>,
             Grid(ceil_div(m.b_nnz * kLanes, kThreads), m.shared ? 1 : most(m.batch)), kThreads, 0, stream, m);
    });
  });
}

}  // namespace weft::sparse
