// What a backward pass has saved, and the words for what was changed in place since.
#pragma once
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>

#include <string>

namespace weft::rnn {

// The saved variables of an op whose user sees it as `layer`. torch's RuntimeError, where one was changed in place,
// names a result by the C++ type of its node: here it names the layer.
inline torch::autograd::variable_list saved_variables(torch::autograd::AutogradContext* ctx, const std::string& layer) {
  try {
    return ctx->get_saved_variables();
  } catch (const c10::Error& error) {
    std::string what = error.what_without_backtrace();
    const std::string node = "torch::autograd::CppNode<";
    for (size_t begin; (begin = what.find(node)) != std::string::npos;) {
      const size_t end = what.find('>', begin);
      what.replace(begin, end == std::string::npos ? node.size() : end + 1 - begin, layer);
    }
    TORCH_CHECK(false, layer, ": ", what);
  }
}

}  // namespace weft::rnn
