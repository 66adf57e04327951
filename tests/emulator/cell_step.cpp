// The kernels of weft::rnn_cell as functions, in float32.
#include "rnn/step/cuda/cell_step.cuh"
#include "emulator.h"

using namespace weft::rnn;

static CellForwardArgs forward_args;
static CellBackwardArgs backward_args;
static void (*forward_kernel)();
static void (*backward_kernel)();

static long tile_of(long B) {
  return B == 1 ? 1 : B <= 4 ? 4 : 8;
}

template <Cell C>
static void choose(int vector) {
  const auto few = [&]<int NB>() {
    forward_kernel = vector == 4 ? [] { cell_forward_few<C, float, NB, 4>(forward_args, blockIdx.x, threadIdx.x); }
                                 : [] { cell_forward_few<C, float, NB, 1>(forward_args, blockIdx.x, threadIdx.x); };
  };
  const long tile = tile_of(forward_args.B);
  tile == 1 ? few.template operator()<1>() : tile == 4 ? few.template operator()<4>() : few.template operator()<8>();
  if (forward_args.in != nullptr) {
    forward_kernel = [] { cell_forward_gates<C, float>(forward_args, 32l * kCellWarps * blockIdx.x + threadIdx.x); };
  }
  backward_kernel = [] {
    cell_backward_step<C, float>(backward_args, long(blockIdx.x) * kCellWarps + threadIdx.x / 32, threadIdx.x % 32);
  };
}

extern "C" void prepare(const CellForwardArgs* forward, const CellBackwardArgs* backward, int vector) {
  forward_args = *forward;
  backward_args = *backward;
  with_cell(forward_args.cell, [&]<Cell C>() { choose<C>(vector); });
}

static long blocks_of(long a, long b) {
  return (a + b - 1) / b;
}

extern "C" void run_forward(unsigned seed) {
  const CellForwardArgs& a = forward_args;
  const long tiles = a.in != nullptr ? blocks_of(a.B * a.H, 32 * kCellWarps)
                                     : blocks_of(a.H, kCellWarps) * blocks_of(a.B, tile_of(a.B));
  emulator::launch(forward_kernel, tiles, 32 * kCellWarps, 1, 0, seed);
}

extern "C" void run_backward(unsigned seed) {
  const CellBackwardArgs& a = backward_args;
  const bool sum = a.b_ih != nullptr || a.b_hh != nullptr;
  const long warps = blocks_of(a.H, kBackwardUnits) * (sum ? 1 : blocks_of(a.B, kBackwardRows));
  emulator::launch(backward_kernel, blocks_of(warps, kCellWarps), 32 * kCellWarps, 1, 0, seed);
}
