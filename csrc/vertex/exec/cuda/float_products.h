// Products of float matrices with the accuracy of fp32 on the tensor cores of compute capability 9.0, several in one
// launch; float_products.jit.cu. Free of torch.
#pragma once
#include <cuda_runtime_api.h>

#include "vertex/exec/cuda/float_products.jit.cuh"

namespace weft::vertex {

// Whether the kernel takes a product at all: its sizes, and how its factors lie. Tiles that are mostly empty are left
// to others.
bool takes(const FloatProduct& p);
// Whether the current device has the kernel, and all of them are enough for it to be worth its while: others have
// smaller tiles.
bool worth_float_products(const FloatProducts& all);
// Of a launch on the current device.
int float_product_blocks(const FloatProducts& all);
constexpr long long kPartialOfBlock = 2LL * kFloatTile * kFloatTile;  // floats

void launch_float_products(const FloatProducts& all, cudaStream_t stream);

}  // namespace weft::vertex
