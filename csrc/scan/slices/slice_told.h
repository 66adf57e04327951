// What a lane that walks a slice tells of its channel, on either device: no torch header.
#pragma once
#include "scan/slices/slice_args.h"

namespace weft::scan {

// Four more factors of a product, of which only the last product waits for what is there.
WEFT_HOST_DEVICE inline void multiply_four(Scaled& product, float a, float b, float c, float d) {
  product.m *= (double(a) * double(b)) * (double(c) * double(d));
  product.rescale_if_far();
}
WEFT_HOST_DEVICE inline void multiply_four(Scaled& product, double a, double b, double c, double d) {
  product.multiply(a), product.multiply(b), product.multiply(c), product.multiply(d);
  product.rescale_if_far();
}

// A channel's part of the message: its product and the value that leaves, and with the first whether anything does.
template <typename T>
WEFT_HOST_DEVICE void tell(const Scaled& product, T value, bool leaves, int64_t channel, int64_t channels,
                           typename Packed<T>::Number* message) {
  message[channel] = pack_product<T>(product);
  __builtin_memcpy(message + channels + channel, &value, sizeof(T));
  if (channel == 0) message[2 * channels] = leaves;
}

}  // namespace weft::scan
