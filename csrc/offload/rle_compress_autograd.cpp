// rle_compress and rle_decompress have no gradient: a backward through them is refused.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "common/autograd.h"
#include "common/refused_gradient.h"
#include "offload/rle_compress.h"

namespace weft::offload {
namespace {

Compressed rle_compress(const at::Tensor& x) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("weft::rle_compress", "").typed<Compressed(const at::Tensor&)>();
  const auto call = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return op.call(x);
  };
  if (!needs_grad(x)) return call();
  const auto results = RefusedGradient::apply(x, std::string("rle_compress"), [&] {
    const auto [runs, values, size] = call();
    return RefusedGradient::Results{runs, values, size};
  });
  return {results[0], results[1], results[2]};
}

at::Tensor rle_decompress(const at::Tensor& runs, const at::Tensor& values, c10::SymIntArrayRef shape) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("weft::rle_decompress", "")
                             .typed<at::Tensor(const at::Tensor&, const at::Tensor&, c10::SymIntArrayRef)>();
  const auto call = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return op.call(runs, values, shape);
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
