// What a backward pass has saved, and the words for what was changed in place since.
#pragma once
#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <torch/csrc/autograd/custom_function.h>

#include <string>
#include <typeinfo>

namespace weft {

// The saved variables of an autograd function whose user sees it as `name`. torch's RuntimeError, where one was changed
// in place, names a result by the C++ type of its node: here it names what the user called.
template <typename Function>
torch::autograd::variable_list saved_variables(torch::autograd::AutogradContext* ctx, const std::string& name) {
  try {
    return ctx->get_saved_variables();
  } catch (const c10::Error& error) {
    std::string what = error.what_without_backtrace();
    const std::string own = c10::demangle(typeid(torch::autograd::CppNode<Function>).name());
    const std::string node = "torch::autograd::CppNode<weft::";
    for (size_t begin; (begin = what.find(own)) != std::string::npos;) what.replace(begin, own.size(), name);
    for (size_t begin; (begin = what.find(node)) != std::string::npos;) {
      const size_t end = what.find('>', begin);
      what.replace(begin, end == std::string::npos ? node.size() : end + 1 - begin, "another operator of Weft");
    }
    TORCH_CHECK(false, name, ": ", what);
  }
}

}  // namespace weft
