// T steps are cut into C chunks of L, and what is left over is done step by step at the end.
//   products:   the product P and offset v of y = P x + v, for all chunks but the last in lockstep: L batched products;
//   boundaries: the state at every chunk's start, C small products in sequence;
//   replay:     the steps of all chunks in lockstep from those states: L batched matrix-vector products.
//
// Robustness without a redo: products, boundaries and v are in fp64, and each column of P carries an exponent. An
// element of fp32 A scales by 2^-149 to 2^128, so kRescale steps between two rescalings keep every column that is not
// exactly 0 well inside fp64's 2^-1022 to 2^1024, whatever A holds: nothing overflows or is lost that fp32 could
// represent. (On the GPUs this is for, fp64 products run on tensor cores, as fast as fp32 ones do without.) For fp64 A
// there is no wider type, so fp64 is never scanned here.
#include "scan/linear/batched.h"

#include <ATen/Context.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/exp2.h>
#include <ATen/ops/frexp.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>

namespace weft::scan {
namespace {

// Microseconds, of one ATen operation on a small tensor; of batched products in fp64; of matrix-vector products and
// conversions.
struct BatchedCosts {
  double launch, teraflop, megabyte;

  explicit BatchedCosts(const costs::Table& of)
      : launch(of("launch")), teraflop(of("fp64_teraflop")), megabyte(of("megabyte")) {}
};
constexpr double kStepLaunches = 1.25;    // operations per sequential step
constexpr double kProductLaunches = 7.5;  // per step of products, rescaling included
constexpr double kBoundaryLaunches = 5;   // per chunk
constexpr double kReplayLaunches = 4;     // per step of replay
constexpr double kConversionBytes = 28;   // per element of A in products: read 4, write 8, read by bmm, read and
                                          // write P
constexpr int64_t kRescale = 4;
constexpr double kMostProductBytes = 2e9;  // what the products of all chunks may take
// Elements of A that are widened at once in the sequential loop.
constexpr int64_t kWidenedElements = int64_t(1) << 24;

double steps_time(double T, double B, double H, const BatchedCosts& costs) {
  return T * std::max(kStepLaunches * costs.launch, 4e-6 * B * H * H * costs.megabyte);
}

double scan_time(double T, double B, double H, double chunks, const BatchedCosts& costs) {
  const double L = T / chunks, matrices = chunks * B, elements = matrices * H * H;
  const double product = kProductLaunches * costs.launch + 2e-12 * elements * H * costs.teraflop +
                         1e-6 * kConversionBytes * elements * costs.megabyte;
  const double replay = std::max(kReplayLaunches * costs.launch, 8e-6 * elements * costs.megabyte);
  return L * (product + replay) + chunks * kBoundaryLaunches * costs.launch;
}

// 1 where the steps one by one are faster.
int64_t choose_chunks(int64_t T, int64_t B, int64_t H, const BatchedCosts& costs) {
  int64_t best = 1;
  double least = steps_time(double(T), double(B), double(H), costs);
  for (int64_t chunks = 4; chunks <= T / 4; chunks += std::max<int64_t>(1, chunks / 4)) {
    if (8. * chunks * B * H * (H + 1) > kMostProductBytes) break;
    const double time = scan_time(double(T), double(B), double(H), double(chunks), costs);
    if (time < least) {
      least = time;
      best = chunks;
    }
  }
  return best;
}

// The problem in the layout of batched products: every state is (G, H, n), G groups that have their own A and n columns
// that share it. Steps are counted in the order of processing.
struct BatchedProblem {
  at::Tensor A;  // (T, G, H, H), as given
  at::Tensor x;  // (T, G, H, n) in the accumulation type: b, replaced by the states
  at::ScalarType type;
  bool reverse, transpose;
  int64_t T() const { return x.size(0); }
  int64_t at(int64_t step) const { return reverse ? T() - 1 - step : step; }
  at::Tensor oriented(const at::Tensor& a) const { return transpose ? a.transpose(-2, -1) : a; }
};

// Steps [begin, end) one by one from `state` (G, H, n); returns the last state.
at::Tensor run_steps(const BatchedProblem& p, at::Tensor state, int64_t begin, int64_t end) {
  const int64_t per_step = std::max<int64_t>(p.A.size(1) * p.A.size(2) * p.A.size(2), 1);
  const int64_t block = std::max<int64_t>(kWidenedElements / per_step, 1);
  for (int64_t s = begin; s < end; s += block) {
    const int64_t count = std::min(block, end - s), low = std::min(p.at(s), p.at(s + count - 1));
    const at::Tensor A = p.oriented(p.A.narrow(0, low, count).to(p.type));
    for (int64_t i = s; i < s + count; ++i) {
      at::Tensor next = p.x.select(0, p.at(i));
      next.baddbmm_(A.select(0, p.at(i) - low), state);
      state = next;
    }
  }
  return state;
}

// Steps [begin, begin + chunks * length) from `state`; returns the last state.
at::Tensor run_chunks(const BatchedProblem& p, at::Tensor state, int64_t begin, int64_t chunks, int64_t length) {
  const int64_t steps = chunks * length, low = std::min(p.at(begin), p.at(begin + steps - 1));
  const int64_t G = p.x.size(1), H = p.x.size(2), n = p.x.size(3);
  const at::Tensor A = p.A.narrow(0, low, steps).unflatten(0, {chunks, length});
  const at::Tensor x = p.x.narrow(0, low, steps).unflatten(0, {chunks, length});
  // Chunk c and step l as they lie in memory.
  auto chunk = [&](int64_t c) { return p.reverse ? chunks - 1 - c : c; };
  auto step = [&](int64_t l) { return p.reverse ? length - 1 - l : l; };
  auto batched = [](const at::Tensor& t) { return t.reshape({-1, t.size(-2), t.size(-1)}); };

  // P and v side by side, (chunks - 1) * G times (H, H + n); the last chunk's are not needed.
  const int64_t first = p.reverse ? 1 : 0;
  at::Tensor both, exponent;
  for (int64_t l = 0; l < length; ++l) {
    const at::Tensor At = batched(p.oriented(A.select(1, step(l)).narrow(0, first, chunks - 1).to(at::kDouble)));
    const at::Tensor bt = batched(x.select(1, step(l)).narrow(0, first, chunks - 1).to(at::kDouble));
    if (l == 0) {
      both = at::cat({At, bt}, 2);
      exponent = at::zeros({both.size(0), 1, H}, both.options());
    } else {
      both = at::bmm(At, both);
      both.narrow(2, H, n).add_(bt);
    }
    if ((l + 1) % kRescale == 0 || l + 1 == length) {
      at::Tensor P = both.narrow(2, 0, H);
      const at::Tensor top = P.abs().amax({1}, true);
      const auto [mantissa, power] = at::frexp(top);
      // Zeros, and columns that are not finite already, stay as they are. mantissa / top is the power of two, exactly.
      const at::Tensor usual = at::isfinite(top).logical_and_(top.gt(0));
      P.mul_(mantissa.div(top).masked_fill_(usual.logical_not(), 1));
      exponent.add_(power.to(at::kDouble).masked_fill_(usual.logical_not(), 0));
    }
  }

  // An exponent beyond fp64's meets only states that fp32 cannot hold, or a product that is 0 in fp32.
  const at::Tensor scale = at::exp2(exponent.clamp_(-1000, 1000)).transpose(1, 2).reshape({chunks - 1, G, H, 1});
  both = both.reshape({chunks - 1, G, H, H + n});
  std::vector<at::Tensor> starts(chunks);
  at::Tensor wide = state.to(at::kDouble);
  starts[chunk(0)] = state;
  for (int64_t c = 0; c + 1 < chunks; ++c) {
    const int64_t at = chunk(c) - first;
    const at::Tensor map = both.select(0, at);
    wide = at::baddbmm(map.narrow(2, H, n), map.narrow(2, 0, H), wide.mul(scale.select(0, at)));
    starts[chunk(c + 1)] = wide.to(p.type);
  }
  both.reset();

  at::Tensor current = batched(at::stack(starts));
  for (int64_t l = 0; l < length; ++l) {
    at::Tensor xt = x.select(1, step(l));
    current = at::baddbmm(batched(xt), batched(p.oriented(A.select(1, step(l)).to(p.type))), current);
    xt.copy_(current.view({chunks, G, H, n}));
  }
  return current.view({chunks, G, H, n}).select(0, chunk(chunks - 1));
}

}  // namespace

at::Tensor linear_scan_batched(const at::Tensor& A, const at::Tensor& b, const std::optional<at::Tensor>& x0,
                               bool reverse, bool transpose, const costs::Table& costs) {
  const int64_t T = b.size(0), B = b.size(1), H = b.size(2);
  if (b.numel() == 0) return at::empty({T, B, H}, b.options());
  const at::NoTF32Guard exact;
  const int64_t chunks = choose_chunks(T, A.size(1), H, BatchedCosts(costs));
  const bool shared = A.size(1) == 1 && B > 1;
  auto grouped = [&](const at::Tensor& t) {  // (..., B, H) to (..., G, H, n)
    return shared ? t.transpose(-2, -1).unsqueeze(-3) : t.unsqueeze(-1);
  };
  BatchedProblem p{A, {}, b.scalar_type() == at::kDouble ? at::kDouble : at::kFloat, reverse, transpose};
  p.x = at::empty(grouped(b).sizes(), b.options().dtype(p.type)).copy_(grouped(b));

  // Without x0 the first state is b alone.
  const int64_t first = x0 ? 0 : 1;
  at::Tensor state = x0 ? grouped(x0->to(p.type)) : p.x.select(0, p.at(0));
  const int64_t length = (T - first) / std::max<int64_t>(chunks, 1);
  int64_t done = first;
  if (chunks > 1 && length > 1 && p.type != at::kDouble) {
    state = run_chunks(p, state, first, chunks, length);
    done += chunks * length;
  }
  run_steps(p, state, done, T);
  const at::Tensor x = shared ? p.x.squeeze(1).transpose(1, 2) : p.x.squeeze(-1);
  return x.to(b.scalar_type()).contiguous();
}

}  // namespace weft::scan
