#include "scan/slices/slice_maps.h"

#include <ATen/ops/empty.h>

#include "common/check.h"

namespace weft::scan {
namespace {

Problem checked_slice(const char* op, const at::Tensor& A, const at::Tensor& b, const std::optional<at::Tensor>& x0,
                      const char* x0_name, int64_t chunks, bool reverse, bool transpose) {
  TORCH_CHECK_TYPE(b.scalar_type() == at::kFloat, op, ": b must be float32, got ", b.scalar_type());
  TORCH_CHECK_VALUE(b.dim() == 3, op, ": b must be (T, B, H), got ", b.sizes());
  check_like(op, "A", A, "b", b);
  const int64_t T = b.size(0), B = b.size(1), H = b.size(2);
  TORCH_CHECK_VALUE(
      A.dim() == 4 && A.size(0) == T && (A.size(1) == B || A.size(1) == 1) && A.size(2) == H && A.size(3) == H, op,
      ": A must be (T, B, H, H) or (T, 1, H, H) to go with b ", b.sizes(), ", got ", A.sizes());
  if (x0) {
    check_like(op, x0_name, *x0, "b", b);
    check_shape(op, x0_name, *x0, b.sizes().slice(1), "(B, H)");
  }
  TORCH_CHECK_VALUE(T >= 1, op, ": b must have at least one step");
  TORCH_CHECK_VALUE(1 <= chunks && chunks <= T, op, ": chunks must be 1 to ", T, ", got ", chunks);
  return {A, b, x0.value_or(at::Tensor()), /*diagonal=*/false, reverse, transpose};
}

}  // namespace

Maps slice_maps(const SliceHalves& halves, const at::Tensor& A, const at::Tensor& b,
                const std::optional<at::Tensor>& x0, int64_t chunks, bool reverse, bool transpose, bool told) {
  const Problem problem = checked_slice("slice_maps", A, b, x0, "x0", chunks, reverse, transpose);
  const int64_t B = b.size(1), H = b.size(2);
  const at::Tensor maps = at::empty({chunks, B, halves.map_floats(H)}, b.options()),
                   value = at::empty({B, H}, b.options()),
                   message = at::empty({told ? slice_message_numbers(A.size(1) * H * H, B * H) : 0},
                                       b.options().dtype(at::kInt));
  if (B > 0 && H > 0) {
    halves.maps(problem, chunks, maps, value, message);
  } else if (told) {
    message.fill_(1);
  }
  return {maps, value, message};
}

void slice_replay(const SliceHalves& halves, const at::Tensor& x, const at::Tensor& A, const at::Tensor& b,
                  const at::Tensor& maps, const at::Tensor& state, const std::optional<at::Tensor>& came,
                  int64_t chunks, bool reverse, bool transpose) {
  const char* const op = "slice_replay_";
  const Problem problem = checked_slice(op, A, b, state, "state", chunks, reverse, transpose);
  check_like(op, "x", x, "b", b);
  check_shape(op, "x", x, b.sizes(), "(T, B, H)");
  TORCH_CHECK_VALUE(x.size(2) <= 1 || x.stride(2) == 1, op, ": x must have unit stride in its last dimension");
  check_like(op, "maps", maps, "b", b);
  const int64_t wanted[] = {chunks, b.size(1), halves.map_floats(b.size(2))};
  check_shape(op, "maps", maps, wanted, "(chunks, B, floats)");
  TORCH_CHECK_VALUE(maps.is_contiguous(), op, ": maps must be contiguous");
  if (came) {
    TORCH_CHECK_TYPE(came->scalar_type() == at::kInt && came->numel() == 1 && came->device() == b.device(), op,
                     ": came must be one int32 on the device of b");
  }
  if (x.numel() == 0) return;
  halves.replay(problem, chunks, maps, came ? came->const_data_ptr<int32_t>() : nullptr, x);
}

}  // namespace weft::scan
