// Streams, events and pinned memory of the movers on CUDA.
#pragma once
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "common/device.h"
#include "offload/mover.h"

namespace weft::offload {

// A point in a stream; events are reused. What waits for it waits for what had been recorded when it began to wait.
class CudaMark : public Mark {
 public:
  explicit CudaMark(c10::cuda::CUDAStream stream);
  ~CudaMark() override;
  CudaMark(const CudaMark&) = delete;
  CudaMark& operator=(const CudaMark&) = delete;
  bool passed() const override;
  double since(const Mark& earlier) const override;
  // Nothing that the stream does from now on starts before this point.
  void hold(c10::cuda::CUDAStream stream) const;
  void synchronize() const;

 private:
  c10::DeviceIndex device_;
  cudaEvent_t event_;
  mutable bool passed_ = false;
};
using CudaMarkPtr = std::shared_ptr<const CudaMark>;

// The streams of one device: out to the host, and back in. Of high priority: what little a codec computes must not
// queue behind the operations that wait for it.
struct Lanes {
  explicit Lanes(c10::DeviceIndex device)
      : out(c10::cuda::getStreamFromPool(true, device)), in(c10::cuda::getStreamFromPool(true, device)) {}
  c10::cuda::CUDAStream out, in;
  MarkPtr last_out, last_in;  // ends of the latest copies
};

// When a copy begins that waits for `ready` and for the copy before it on its lane.
inline MarkPtr begin_of(const MarkPtr& ready, const MarkPtr& before) {
  return before == nullptr ? ready : std::make_shared<Later>(ready, before);
}

// Of a device, made when they are first asked for.
class LanesOf {
 public:
  Lanes& operator[](c10::DeviceIndex device) {
    auto& lanes = lanes_[device];
    if (lanes == nullptr) lanes = std::make_unique<Lanes>(device);
    return *lanes;
  }

 private:
  std::map<c10::DeviceIndex, std::unique_ptr<Lanes>> lanes_;
};

// Memory for `bytes` bytes from torch's allocator, for the device's current stream.
c10::Storage allocate_on(c10::Device device, int64_t bytes);

// The stream that the memory was saved or allocated on may not be the one it was allocated for: its allocator has to
// know, or it gives the memory to work that is not behind ours. Does nothing where they are the same.
void used_on(const c10::Storage& storage, c10::cuda::CUDAStream stream);

}  // namespace weft::offload
