// The two halves of a slice's scan, csrc/scan/linear/cuda/warp_slice.cuh, blocks one after the other: products, what
// the slice tells, boundaries and replay. The caller compares. H 8 and 20 alone are compiled, of FEW H 20.
#include "map_products.h"
#define __shared__ static

#include "scan/linear/cuda/warp_slice.cuh"

namespace {

using namespace weft::scan;

template <int HP>
void run_both(const LinearScan& scan, const WarpPlan& plan, const SliceMaps& told, const void* state,
              const int32_t* came) {
  std::vector<char> memory;
  const auto allocate = [&](size_t bytes) {
    memory.resize(bytes);
    return static_cast<void*>(memory.data());
  };
  LinearScan again = scan;
  again.x0 = state, again.x0_b = scan.H;
  const auto run = [&]<bool kTransposed, bool kAligned>() {
    make_slice_maps<HP, kTransposed, kAligned>(scan, plan, told, allocate, nullptr);
    if (state) replay_slice<HP, kTransposed, kAligned>(again, plan, told.maps, came, nullptr);
  };
  const bool aligned = lines_are_aligned(scan);
  if (scan.A_col == 1) {
    aligned ? run.template operator()<false, true>() : run.template operator()<false, false>();
  } else {
    aligned ? run.template operator()<true, true>() : run.template operator()<true, false>();
  }
}

}  // namespace

// The scan of `state`, or where `came` says so of nothing, into scan.out; told.message of so many rows of products.
extern "C" void run(const LinearScan* scan, int64_t chunks, int64_t length, bool columns, float* maps, float* value,
                    int32_t* message, int64_t rows, const void* state, const int32_t* came, unsigned seed) {
  weft::when.seed(seed);
  weft::processors = 100;
  const WarpPlan plan{chunks, length, columns, true};
  const SliceMaps told{maps, value, message, rows, rows * scan->H * scan->H};
#if !FEW
  if (scan->H <= 8) return run_both<8>(*scan, plan, told, state, came);
#endif
  run_both<20>(*scan, plan, told, state, came);
}
