// rle_compress and rle_decompress have no gradient: a backward through them is refused.
#include <torch/library.h>

#include "common/autograd.h"
#include "common/refused_gradient.h"
#include "offload/rle_compress.h"

namespace weft::offload {
namespace {

Compressed rle_compress(const at::Tensor& x) {
  const auto call = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return rle_compress_op(x);
  };
  if (!needs_grad(x)) return call();
  const auto results = RefusedGradient::apply(x, std::string("rle_compress"), [&] {
    const auto [runs, values, size] = call();
    return RefusedGradient::Results{runs, values, size};
  });
  return {results[0], results[1], results[2]};
}

at::Tensor rle_decompress(const at::Tensor& runs, const at::Tensor& values, c10::SymIntArrayRef shape) {
  const auto call = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return rle_decompress_op(runs, values, shape);
  };
  if (!needs_grad(values)) return call();
  return RefusedGradient::apply(values, std::string("rle_decompress"),
                                [&] { return RefusedGradient::Results{call()}; })[0];
}

TORCH_LIBRARY_IMPL(weft, Autograd, m) {
  m.impl("rle_compress", rle_compress);
  m.impl("rle_decompress", rle_decompress);
}

}  // namespace
}  // namespace weft::offload
