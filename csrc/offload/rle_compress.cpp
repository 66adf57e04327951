// Checks of rle_decompress, for both devices; rle_compress's are zvc_compress's.
#include "offload/rle_compress.h"

#include "common/check.h"

namespace weft::offload {

int64_t check_rle(const char* op, const at::Tensor& runs, const at::Tensor& values, at::IntArrayRef shape) {
  check_compressed(op, "runs", runs, values);
  return check_numel(op, shape);
}

}  // namespace weft::offload
