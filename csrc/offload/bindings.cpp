// offload, as Python sees it: the policy. The engine, which needs torch, has a file of its own.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "offload/policy/policy.h"

namespace py = pybind11;

namespace weft::offload {

void bind_engine(py::module_& m, py::module_& testing);

namespace {

// bytes, last_forward, first_backward, last_backward, density, itemsize
using SavedTuple = std::tuple<int64_t, int64_t, int64_t, int64_t, double, int64_t>;
using MoveTuple = std::tuple<int64_t, int64_t, bool, double>;
using Rates = std::tuple<double, double, double, double>;  // d2h, h2d, codec, least

Link link(const Rates& rates) {
  return std::make_from_tuple<Link>(rates);
}

Timeline timeline(std::vector<double> seconds, bool known, int64_t forward, const std::vector<SavedTuple>& tensors) {
  Timeline t{std::move(seconds), known, forward, {}};
  for (const auto& [bytes, last_forward, first_backward, last_backward, density, itemsize] : tensors)
    t.tensors.push_back({bytes, last_forward, first_backward, last_backward, density, itemsize});
  return t;
}

void bind_policy(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  m.def(
      "simulate",
      [](std::vector<double> seconds, bool known, int64_t forward, const std::vector<SavedTuple>& tensors,
         const std::vector<MoveTuple>& moves, Budget budget, Rates rates) {
        std::vector<Move> list;
        for (const auto& [tensor, prefetch, compressed, share] : moves)
          list.push_back({tensor, prefetch, compressed, share});
        const Prediction p = simulate(timeline(std::move(seconds), known, forward, tensors), list, budget, link(rates));
        return std::make_tuple(p.peak_bytes, p.seconds, p.forward_stall, p.backward_stall, p.moved_bytes, p.sent_bytes,
                               p.codec_seconds);
      },
      NoGil(),
      "(peak_bytes, seconds, forward_stall, backward_stall, moved_bytes, sent_bytes, codec_seconds) of checked "
      "moves.",
      py::arg("seconds"), py::arg("known"), py::arg("forward"), py::arg("tensors"), py::arg("moves"), py::arg("budget"),
      py::arg("rates"));
  m.def(
      "plan",
      [](std::vector<double> seconds, bool known, int64_t forward, const std::vector<SavedTuple>& tensors,
         Budget budget, Rates rates, bool compress, const std::vector<bool>& movable, double slowdown) {
        std::vector<MoveTuple> list;
        for (const Move& move : plan(timeline(std::move(seconds), known, forward, tensors), budget, link(rates),
                                     compress, movable, slowdown))
          list.emplace_back(move.tensor, move.prefetch, move.compressed, move.share);
        return list;
      },
      NoGil(), "[(tensor, prefetch, compressed, share)] in the order of the copies in, for a checked timeline.",
      py::arg("seconds"), py::arg("known"), py::arg("forward"), py::arg("tensors"), py::arg("budget"), py::arg("rates"),
      py::arg("compress"), py::arg("movable"), py::arg("slowdown"));
}

}  // namespace

void bind(py::module_& m, py::module_& testing) {
  bind_policy(m);
  bind_engine(m, testing);
}

}  // namespace weft::offload
