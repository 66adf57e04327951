#include "common/cuda/captured.h"

#include <mutex>
#include <utility>
#include <vector>

#include "common/device.h"

namespace weft {
namespace {

// A graph tells that it is gone from a thread where no call of CUDA is allowed, and to free pinned memory is one: the
// tensors wait here for the next who asks. Nothing of this is destroyed at exit, after CUDA.
struct Kept {
  std::mutex mutex;
  int64_t count = 0;
  std::vector<at::Tensor> gone;
};
Kept& kept() {
  static auto* const only = new Kept;
  return *only;
}

void graph_is_gone(void* data) {
  auto* const tensor = static_cast<at::Tensor*>(data);
  {
    const std::lock_guard lock(kept().mutex);
    --kept().count;
    kept().gone.push_back(std::move(*tensor));
  }
  delete tensor;
}

// Frees what no graph reads any more.
void sweep() {
  std::vector<at::Tensor> gone;
  const std::lock_guard lock(kept().mutex);
  gone.swap(kept().gone);
}

cudaGraph_t graph_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status;
  cudaGraph_t graph = nullptr;
#if CUDART_VERSION >= 13000
  cuda_check(cudaStreamGetCaptureInfo(stream, &status, nullptr, &graph, nullptr, nullptr, nullptr),
             "cudaStreamGetCaptureInfo");
#else
  cuda_check(cudaStreamGetCaptureInfo_v2(stream, &status, nullptr, &graph, nullptr, nullptr),
             "cudaStreamGetCaptureInfo");
#endif
  return status == cudaStreamCaptureStatusActive ? graph : nullptr;
}

}  // namespace

void keep_while_captured(const at::Tensor& tensor, cudaStream_t stream) {
  const cudaGraph_t graph = graph_of(stream);
  if (graph == nullptr) return sweep();
  auto* const copy = new at::Tensor(tensor);
  {
    const std::lock_guard lock(kept().mutex);
    ++kept().count;
  }
  cudaUserObject_t object;
  if (const auto status = cudaUserObjectCreate(&object, copy, graph_is_gone, 1, cudaUserObjectNoDestructorSync);
      status != cudaSuccess) {
    graph_is_gone(copy);
    cuda_check(status, "cudaUserObjectCreate");
  }
  if (const auto status = cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove); status != cudaSuccess) {
    cudaUserObjectRelease(object, 1);
    cuda_check(status, "cudaGraphRetainUserObject");
  }
}

int64_t captured_count() {
  const std::lock_guard lock(kept().mutex);
  return kept().count;
}

}  // namespace weft
