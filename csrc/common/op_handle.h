// An operator of torch.ops.weft as its contract declares it, for calls through the dispatcher: under autograd and with
// fake tensors, on every device. It is looked up when it is first called, because registration has no order.
//
//   inline const OpHandle<at::Tensor(const at::Tensor&)> negate_op("weft::negate");   // in negate.h
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

#include <mutex>
#include <optional>
#include <utility>

namespace weft {

template <typename Signature>
class OpHandle;

template <typename Result, typename... Args>
class OpHandle<Result(Args...)> {
 public:
  constexpr explicit OpHandle(const char* name) : name_(name) {}

  Result operator()(Args... args) const {
    std::call_once(found_, [this] {
      handle_ = c10::Dispatcher::singleton().findSchemaOrThrow(name_, "").template typed<Result(Args...)>();
    });
    return handle_->call(std::forward<Args>(args)...);
  }

 private:
  const char* name_;
  mutable std::once_flag found_;
  mutable std::optional<c10::TypedOperatorHandle<Result(Args...)>> handle_;
};

}  // namespace weft
