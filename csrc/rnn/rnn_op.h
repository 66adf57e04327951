// weft::rnn and its backward as C++ calls through the dispatcher; the arguments are described in rnn.h.
#pragma once
#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <tuple>
#include <vector>

namespace weft {

using RnnSignature = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>(
    const at::Tensor&, const std::optional<at::Tensor>&, const std::optional<at::Tensor>&, at::TensorList,
    const std::optional<at::Tensor>&, c10::string_view, bool, bool, bool);
const c10::TypedOperatorHandle<RnnSignature>& rnn_op();

using RnnBackwardSignature = std::vector<at::Tensor>(const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
                                                     const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
                                                     const at::Tensor&, const std::optional<at::Tensor>&,
                                                     const std::optional<at::Tensor>&, at::TensorList,
                                                     const std::optional<at::Tensor>&, const at::Tensor&,
                                                     const at::Tensor&, const at::Tensor&, c10::string_view, bool,
                                                     c10::List<bool>);
const c10::TypedOperatorHandle<RnnBackwardSignature>& rnn_backward_op();

}  // namespace weft
