// Checks and allocation of zeros_changed, for both devices.
#include "sparse/zeros_changed.h"

#include <ATen/ops/zeros.h>

#include <string>

#include "common/check.h"

namespace weft::sparse {

at::Tensor zeros_changed_forward(RunZeros run, at::TensorList weights, at::TensorList stored) {
  constexpr const char* kOp = "zeros_changed";
  TORCH_CHECK_VALUE(!weights.empty() && weights.size() == stored.size(), kOp,
                    ": weights and stored must be as many, at least one, got ", weights.size(), " and ", stored.size());
  std::vector<StoredZeros> parts;
  for (size_t i = 0; i < weights.size(); ++i) {
    const std::string name = "weights[" + std::to_string(i) + "]";
    check_floating(kOp, name.c_str(), weights[i]);
    check_like(kOp, name.c_str(), weights[i], "weights[0]", weights[0]);
    TORCH_CHECK_TYPE(stored[i].scalar_type() == at::kBool, kOp, ": stored[", i, "] must be bool, got ",
                     stored[i].scalar_type());
    TORCH_CHECK(stored[i].device() == weights[0].device(), kOp, ": stored[", i, "] must be on ", weights[0].device(),
                ", got ", stored[i].device());
    TORCH_CHECK_VALUE(
        stored[i].numel() == weights[i].numel() && stored[i].is_contiguous() && weights[i].is_contiguous(), kOp,
        ": stored[", i, "] must be contiguous and of the size of its weight, ", weights[i].sizes(), ", got ",
        stored[i].sizes());
    if (weights[i].numel() == 0) continue;
    parts.push_back({weights[i].const_data_ptr(), stored[i].const_data_ptr<bool>(), weights[i].numel()});
  }
  at::Tensor changed = at::zeros({1}, weights[0].options().dtype(at::kInt).requires_grad(false));
  if (!parts.empty()) run(parts, int(weights[0].element_size()), changed.mutable_data_ptr<int>());
  return changed;
}

}  // namespace weft::sparse
