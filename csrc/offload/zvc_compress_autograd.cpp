// zvc_compress and zvc_decompress have no gradient: a backward through them is refused.
#include <torch/library.h>

#include "common/autograd.h"
#include "common/refused_gradient.h"
#include "offload/zvc_compress.h"

namespace weft::offload {
namespace {

Compressed zvc_compress(const at::Tensor& x) {
  const auto call = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return zvc_compress_op(x);
  };
  if (!needs_grad(x)) return call();
  const auto results = RefusedGradient::apply(x, std::string("zvc_compress"), [&] {
    const auto [mask, values, size] = call();
    return RefusedGradient::Results{mask, values, size};
  });
  return {results[0], results[1], results[2]};
}

at::Tensor zvc_decompress(const at::Tensor& mask, const at::Tensor& values, c10::SymIntArrayRef shape) {
  const auto call = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return zvc_decompress_op(mask, values, shape);
  };
  if (!needs_grad(values)) return call();
  return RefusedGradient::apply(values, std::string("zvc_decompress"),
                                [&] { return RefusedGradient::Results{call()}; })[0];
}

TORCH_LIBRARY_IMPL(weft, Autograd, m) {
  m.impl("zvc_compress", zvc_compress);
  m.impl("zvc_decompress", zvc_decompress);
}

}  // namespace
}  // namespace weft::offload
