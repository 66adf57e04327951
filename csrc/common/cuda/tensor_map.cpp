#include "common/cuda/tensor_map.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace weft {
namespace {

using Encoder = decltype(&cuTensorMapEncodeTiled);

// The driver's own function, which the runtime has no other name for; null where the driver is too old.
Encoder encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
#else
  const cudaError_t status = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
  if (status != cudaSuccess) cudaGetLastError();
  const bool there = status == cudaSuccess && found == cudaDriverEntryPointSuccess;
  return there ? reinterpret_cast<Encoder>(function) : nullptr;
}

}  // namespace

bool make_tensor_map(const MappedTensor& tensor, void* map) {
  static const Encoder encode = encoder();
  if (encode == nullptr) return false;
  const CUtensorMapDataType type = tensor.element_bytes == 2   ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                                   : tensor.element_bytes == 4 ? CU_TENSOR_MAP_DATA_TYPE_UINT32
                                                               : CU_TENSOR_MAP_DATA_TYPE_UINT64;
  cuuint64_t extents[3], strides[2];
  for (int i = 0; i < 3; ++i) extents[i] = cuuint64_t(tensor.extents[i]);
  for (int i = 0; i < 2; ++i) strides[i] = cuuint64_t(tensor.strides[i]);
  const cuuint32_t box[3] = {cuuint32_t(tensor.box[0]), cuuint32_t(tensor.box[1]), 1}, every[3] = {1, 1, 1};
  return encode(static_cast<CUtensorMap*>(map), type, 3, const_cast<void*>(tensor.base), extents, strides, box, every,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace weft
