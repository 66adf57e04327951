// The two halves of a slice's backward pass, csrc/rnn/scan/cuda/scan_warp.cuh, blocks one after the other: products,
// what the slice tells, boundaries and replay. The caller compares. CELL: its number in rnn/cells; H 8 and 20 alone are
// compiled.
#include "map_products.h"
#define __shared__ static

#include "rnn/scan/cuda/scan_warp.cuh"

namespace {

using namespace weft::rnn;

constexpr Cell kCell = Cell(CELL);

template <int HP>
void run_both(const ScanShape& shape, const ScanChain<float>& chain, int chunks, const SliceMaps& told,
              const float* grad_h, const float* grad_c) {
  std::vector<char> memory;
  const auto allocate = [&](size_t bytes) {
    memory.resize(bytes);
    return static_cast<void*>(memory.data());
  };
  ForCell<kCell>::ToldOfSlice<HP>::run(shape, chain, chunks, told, allocate, nullptr);
  ScanChain<float> again = chain;
  std::vector<float> starts(size_t(chunks) * shape.B * Map<kCell, HP>::kStates);
  again.grad_h_n = grad_h, again.grad_c_n = grad_c, again.workspace = starts.data();
  ForCell<kCell>::ReplayOfSlice<HP>::run(shape, again, chunks, told.maps, nullptr);
}

}  // namespace

// sizes: T, B, H. tensors: grad_output, w_hh, h0, c0, output, gates, cells, dgates, grad_h0, grad_c0, then maps, value,
// message, and the gradients of the states that leave.
extern "C" void run(const int64_t* sizes, int chunks, void* const* p, unsigned seed) {
  weft::when.seed(seed);
  weft::processors = 100;
  const auto number = [&](int i) { return static_cast<float*>(p[i]); };
  const ScanShape shape{kCell, sizes[0], sizes[1], int(sizes[2]), false};
  const ScanChain<float> chain{number(0), nullptr,   nullptr,   number(1), number(2), number(3), number(4),
                               number(5), number(6), number(7), number(8), number(9), nullptr};
  const int64_t states = weft::rnn::states_of(kCell) * shape.H;
  const SliceMaps told{number(10), number(11), static_cast<int32_t*>(p[12]), shape.B, shape.B * states * states};
  shape.H <= 8 ? run_both<8>(shape, chain, chunks, told, number(13), number(14))
               : run_both<20>(shape, chain, chunks, told, number(13), number(14));
}
