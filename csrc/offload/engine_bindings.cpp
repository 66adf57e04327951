// The Python bindings of the offload engine: an Engine per offload object, a Use per `with` block, a Packed per saved
// tensor.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <exception>
#include <ranges>

#include "offload/tracker/tracker.h"

namespace weft::offload {
namespace {

// Asks for the latest events first: those before them on their streams are then known to have completed.
void ask_latest(const Tracker& tracker) {
  for (const bool out : {false, true})
    for (const Span& span : std::views::reverse(tracker.spans))
      if (span.out == out && span.end != nullptr && span.end->completed()) break;
  for (const EventPtr& event : std::views::reverse(tracker.events))
    if (event != nullptr && event->completed()) break;
}

// Seconds of each operation without its waits, measured between recorded events; nullopt before all have completed.
std::optional<std::vector<double>> seconds(const Tracker& tracker) {
  ask_latest(tracker);
  std::vector<double> result;
  const Event* last = nullptr;
  for (const EventPtr& event : tracker.events) {
    if (event != nullptr && !event->completed()) return std::nullopt;
    if (&event == &tracker.events.front()) {
      last = event.get();
      continue;
    }
    result.push_back(event != nullptr && last != nullptr ? event->since(*last) : 0);
    if (event != nullptr) last = event.get();
  }
  // The last operation has not ended while its tensors are held.
  const size_t operations = size_t(tracker.forward == 0 ? tracker.saves + 1 : tracker.forward + tracker.reads);
  result.resize(operations, 0);
  for (const Stall& stall : tracker.stalls) {
    if (!stall.end->completed()) return std::nullopt;
    // The time of an operation without an event at its end counts for the next one with an event.
    size_t k = size_t(stall.operation);
    while (k + 1 < tracker.events.size() && tracker.events[k + 1] == nullptr) ++k;
    if (k < operations) result[k] -= stall.end->since(*stall.begin);
  }
  for (double& s : result) s = std::max(s, 0.0);
  return result;
}

// Whether all events have completed; queries the last one of each stream.
bool completed(const Tracker& tracker) {
  c10::SmallVector<const void*, 4> asked;
  for (const EventPtr& event : std::views::reverse(tracker.events)) {
    if (event == nullptr || std::ranges::find(asked, event->stream()) != asked.end()) continue;
    if (!event->completed()) return false;
    asked.push_back(event->stream());
  }
  return true;
}

py::dict statistics(const Tracker& tracker) {
  ask_latest(tracker);
  py::dict d;
  const Totals& t = tracker.totals;
  d["device"] = tracker.residency.device.str();
  d["budgeted"] = tracker.residency.budgeted;
  d["saved_bytes"] = t.saved_bytes, d["saved_tensors"] = t.saved_tensors;
  d["moved_bytes"] = t.moved_bytes, d["moved_tensors"] = t.moved_tensors;
  d["compressed_tensors"] = t.compressed_tensors, d["unhooked_tensors"] = t.unhooked_tensors;
  d["peak_bytes"] = tracker.peak, d["peak_bytes_without"] = tracker.peak_without;
  auto kept = t.kept;
  for (const auto& record : tracker.latest)
    if (!record->moved && record->reason == kBudget) kept[kBudget] -= record->bytes, kept[kLast] += record->bytes;
  py::dict reasons;
  for (size_t i = 0; i < kReasons; ++i) reasons[kReasonNames[i]] = kept[i];
  d["kept"] = reasons;

  py::list stalls;
  for (const Stall& s : tracker.stalls)
    if (const double waited = s.end->completed() ? s.end->since(*s.begin) : 0; waited > 0)
      stalls.append(py::make_tuple(s.forward, s.operation, s.name, waited));
  d["stalls"] = stalls;
  // (out, begin, end, bytes, whether compressed), in seconds since the first event.
  py::list copies;
  const EventPtr first = tracker.events.empty() ? nullptr : tracker.events.front();
  const EventPtr origin = first != nullptr && first->completed() ? first : nullptr;
  int64_t crossed[] = {t.returned_bytes, t.sent_bytes};
  for (const auto& [out, sent, begin, end] : tracker.spans) {
    crossed[out] += sent.bytes();
    if (origin == nullptr || begin == nullptr || end == nullptr || !end->completed()) continue;
    const bool compressed = !sent.parts.empty();
    copies.append(py::make_tuple(out, begin->since(*origin), end->since(*origin), sent.bytes(), compressed));
  }
  d["sent_bytes"] = crossed[1], d["returned_bytes"] = crossed[0];
  d["copies"] = copies;
  py::list curve;
  for (size_t i = 0; i < tracker.events.size(); ++i)
    if (tracker.events[i] != nullptr && origin != nullptr && tracker.events[i]->completed())
      curve.append(py::make_tuple(tracker.events[i]->since(*origin), tracker.curve[i]));
  d["curve"] = curve;
  return d;
}

// Seconds and bytes of the copies that have ended: (out, bytes out, back, bytes back). `compressed`: counts those, too.
std::tuple<double, int64_t, double, int64_t> copied(const Tracker& tracker, bool compressed) {
  ask_latest(tracker);
  double seconds[] = {0, 0};
  int64_t bytes[] = {0, 0};
  for (const auto& [out, sent, begin, end] : tracker.spans) {
    if (begin == nullptr || end == nullptr || (!compressed && !sent.parts.empty()) || !end->completed()) continue;
    seconds[out] += end->since(*begin), bytes[out] += sent.bytes();
  }
  return {seconds[1], bytes[1], seconds[0], bytes[0]};
}

double density(const Record& record) {
  int64_t n = 0, nonzeros = 0;
  for (const Count& count : record.counts)
    if (count.nonzeros != nullptr) n += count.n, nonzeros += *count.nonzeros;
  return n == 0 ? 1 : std::clamp(double(nonzeros) / double(n), 0.0, 1.0);
}

// (operations, their seconds or None, operations of the forward, tensors, per tensor: bytes of its first save,
// itemsize, whether it may move, after how many of them it was saved again the last time, whether its density is
// known). A tensor that was never read counts to the end.
py::tuple timeline(const Tracker& tracker) {
  const int64_t forward = tracker.forward == 0 ? tracker.saves + 1 : tracker.forward;
  const int64_t operations = std::max(forward + tracker.reads, forward + 1);
  auto times = seconds(tracker);
  if (times) times->resize(size_t(operations), 0);
  py::list tensors, first;
  for (const auto& r : tracker.timeline) {
    const int64_t end = operations - 1;
    tensors.append(py::make_tuple(r->uncounted ? 0 : r->bytes, r->number, r->first_read < 0 ? end : r->first_read,
                                  r->first_read < 0 ? end : r->last_read, density(*r), r->itemsize));
    first.append(py::make_tuple(r->first_bytes, r->itemsize, r->reason == kBudget || r->reason == kPool || r->moved,
                                r->saved_again, !r->counts.empty()));
  }
  return py::make_tuple(operations, times ? py::cast(*times) : py::none(), forward, tensors, first);
}

Codec codec(const std::optional<std::string>& name) {
  if (!name) return Codec::none;
  return *name == "auto" ? Codec::automatic : *name == "zvc" ? Codec::zvc : Codec::rle;
}

// Moves one tensor to the host and back as the tracker does, for tests and benchmarks.
struct RoundTrip {
  std::shared_ptr<Transfer> transfer;
  c10::Device device;
  int64_t bytes;
};

Bytes bytes_of(const Engine& engine, const at::Tensor& x) {
  if (!engine.mover->moves(x.device()) || !x.is_contiguous() || x.numel() == 0)
    throw py::value_error("x must be contiguous, not empty, and on a device whose tensors move");
  const int64_t lo = x.storage_offset() * int64_t(x.itemsize());
  return {x.storage(), lo, lo + int64_t(x.nbytes()), x.scalar_type()};
}

std::shared_ptr<Mover> mover(const std::string& backend, int64_t pool_limit, Codec codec,
                             std::optional<int64_t> budget) {
  if (backend == "reference") return make_reference_mover(pool_limit);
#ifdef WEFT_WITH_CUDA
  if (backend == "copy") return make_copy_mover(pool_limit, codec, budget);
  if (backend == "managed") return make_managed_mover(pool_limit);
#endif
  return make_idle_mover();
}

// The round trip keeps its tensors alive: nothing else knows that the copies use them.
void bind_testing(py::module_& testing) {
  testing.def(
      "offload_refuse",
      [](int64_t host, int64_t device) {
        refusals().host = host;
        refusals().device = device;
      },
      "Makes the next allocations fail: `host` of host memory, `device` of device memory for restored tensors and the "
      "codec.",
      py::arg("host") = 0, py::arg("device") = 0);
#ifdef WEFT_WITH_CUDA
  testing.def(
      "offload_stages",
      [](int64_t segment, int compress, int decompress) {
        if (segment < 0 || segment % 128 != 0 || compress < 0 || decompress < 0)
          throw py::value_error("segment must be a multiple of 128 bytes, the numbers of blocks not negative");
        set_stages(segment, compress, decompress);
      },
      "How the codecs of objects made from now on stage a tensor.", py::arg("segment") = 0, py::arg("compress") = 0,
      py::arg("decompress") = 0);
#endif
  py::class_<RoundTrip>(testing, "OffloadRoundTrip")
      .def(py::init(
               [](std::shared_ptr<Engine> engine, const at::Tensor& x, bool compressed, double density, double share) {
                 auto transfer = engine->mover->out(bytes_of(*engine, x), compressed ? Codec::zvc : Codec::none,
                                                    nullptr, density, share);
                 if (transfer == nullptr) throw std::runtime_error("no host memory for the tensor");
                 return RoundTrip{std::move(transfer), x.device(), int64_t(x.nbytes())};
               }),
           py::arg("engine"), py::arg("x"), py::arg("compressed"), py::arg("density"), py::arg("share") = 1.0,
           py::keep_alive<1, 2>(), py::keep_alive<1, 3>())
      .def(
          "bring_back",
          [](RoundTrip& round_trip, const Engine& engine, const at::Tensor& to) {
            if (to.device() != round_trip.device || int64_t(to.nbytes()) != round_trip.bytes)
              throw py::value_error("to must be as large as what went out, and on its device");
            round_trip.transfer->start_in(bytes_of(engine, to), nullptr);
          },
          py::arg("engine"), py::arg("to"), py::keep_alive<1, 3>())
      .def_property_readonly("sent_bytes",
                             [](const RoundTrip& round_trip) { return round_trip.transfer->sent.bytes(); });
}

// ---- The pair of hooks, called for every saved tensor of a step: pybind11's objects and dispatch would dominate their
// cost.

constexpr const char* kUse = "weft.offload.use";
constexpr const char* kPacked = "weft.offload.packed";

template <typename T>
PyObject* capsule(std::unique_ptr<T> value, const char* name) {
  PyObject* const object = PyCapsule_New(value.get(), name, [](PyObject* self) {
    delete static_cast<T*>(PyCapsule_GetPointer(self, PyCapsule_GetName(self)));
  });
  if (object == nullptr) throw py::error_already_set();
  value.release();
  return object;
}

template <typename T>
T& inside(PyObject* object, const char* name) {
  void* const data = PyCapsule_GetPointer(object, name);
  if (data == nullptr) throw py::error_already_set();
  return *static_cast<T*>(data);
}

PyObject* pack(PyObject* self, PyObject* x) {
  HANDLE_TH_ERRORS
  if (!THPVariable_Check(x)) throw py::type_error("offload packs tensors");
  return capsule(inside<std::shared_ptr<Use>>(self, kUse)->pack(x), kPacked);
  END_HANDLE_TH_ERRORS
}

PyObject* unpack(PyObject* self, PyObject* packed) {
  HANDLE_TH_ERRORS
  return THPVariable_Wrap(inside<std::shared_ptr<Use>>(self, kUse)->unpack(inside<Packed>(packed, kPacked)));
  END_HANDLE_TH_ERRORS
}

// Made for one thread, which puts them where autograd finds them.
py::tuple hooks(std::shared_ptr<Use> use) {
  static PyMethodDef methods[] = {{"pack", pack, METH_O, nullptr}, {"unpack", unpack, METH_O, nullptr}};
  const auto self =
      py::reinterpret_steal<py::object>(capsule(std::make_unique<std::shared_ptr<Use>>(std::move(use)), kUse));
  const auto bound = [&](PyMethodDef& method) {
    PyObject* const function = PyCFunction_New(&method, self.ptr());
    if (function == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(function);
  };
  return py::make_tuple(bound(methods[0]), bound(methods[1]));
}

}  // namespace

void bind_engine(py::module_& m, py::module_& testing) {
#ifdef WEFT_WITH_CUDA
  m.def("has_managed", &has_managed, "Whether host and device may use managed memory at the same time.",
        py::arg("device"));
#else
  m.def(
      "has_managed", [](int) { return false; }, py::arg("device"));
#endif
  py::class_<TransferPlan, std::shared_ptr<TransferPlan>>(m, "TransferPlan")
      .def(py::init([](const std::vector<std::tuple<int64_t, int64_t, bool, double, double>>& tensors,
                       std::vector<std::pair<int64_t, int64_t>> back, int64_t room, int64_t hooked,
                       int64_t unhooked_reads, int64_t unhooked_bytes) {
             auto plan = std::make_shared<TransferPlan>();
             for (const auto& [bytes, itemsize, moves, share, density] : tensors)
               plan->tensors.push_back({bytes, itemsize, moves, share, density});
             plan->back = std::move(back);
             plan->room = room;
             plan->hooked = hooked, plan->unhooked_reads = unhooked_reads, plan->unhooked_bytes = unhooked_bytes;
             return plan;
           }),
           py::arg("tensors"), py::arg("back"), py::arg("room"), py::arg("hooked") = 0, py::arg("unhooked_reads") = 0,
           py::arg("unhooked_bytes") = 0);
  py::class_<Use, std::shared_ptr<Use>>(m, "Use")
      .def_property_readonly("hooks", &hooks)
      .def("exit", &Use::exit)
      .def("rehook", &Use::rehook, "Before the hooks are taken back: puts them where `unhook` found them.")
      .def_property_readonly("unhooked", [](const Use& use) { return use.unhooked(); })
      .def_property_readonly("finished", &Use::finished)
      .def_readonly("timed", &Use::timed)
      .def_readonly("slow", &Use::slow)
      .def_readonly("uncounted_from", &Use::uncounted_from)
      .def_property_readonly("saves",
                             [](const Use& use) {
                               int64_t saves = 0;
                               for (const auto& tracker : use.trackers) saves += tracker->saves;
                               return saves;
                             })
      .def_property_readonly(
          "completed",
          [](const Use& use) { return std::ranges::all_of(use.trackers, [](const auto& l) { return completed(*l); }); })
      .def("statistics",
           [](const Use& use) {
             py::list list;
             for (const auto& tracker : use.trackers) list.append(statistics(*tracker));
             return list;
           })
      .def(
          "copied",
          [](const Use& use, bool compressed) {
            std::map<int, std::tuple<double, int64_t, double, int64_t>> found;
            for (const auto& tracker : use.trackers)
              if (tracker->residency.device.is_cuda())
                found.emplace(tracker->residency.device.index(), copied(*tracker, compressed));
            return found;
          },
          py::arg("compressed"))
      .def("timelines",
           [](const Use& use) {
             py::list list;
             for (const auto& tracker : use.trackers) {
               const auto device = tracker->residency.device;
               list.append(py::make_tuple(device.is_cpu() ? -1 : int(device.index()), tracker->residency.budgeted,
                                          timeline(*tracker)));
             }
             return list;
           })
      .def("planned", [](const Use& use) {
        return std::ranges::all_of(use.trackers, [](const auto& tracker) { return tracker->planned(); });
      });
  py::class_<Engine, std::shared_ptr<Engine>>(m, "Engine")
      .def(py::init([](const std::string& backend, std::optional<int64_t> budget,
                       const std::optional<std::string>& compress, int64_t min_bytes, int64_t keep_last,
                       int64_t pool_limit) {
             return std::make_shared<Engine>(Settings{budget, codec(compress), min_bytes, keep_last},
                                             mover(backend, pool_limit, codec(compress), budget));
           }),
           py::arg("backend"), py::arg("budget"), py::arg("compress"), py::arg("min_bytes"), py::arg("keep_last"),
           py::arg("pool_limit"))
      .def(
          "use",
          [](std::shared_ptr<Engine> engine, std::map<int, std::shared_ptr<TransferPlan>> plans, bool timed,
             double counting_seconds, int64_t counts_from, int64_t every, bool unhooks) {
            return std::make_shared<Use>(std::move(engine),
                                         std::map<int, std::shared_ptr<const TransferPlan>>(plans.begin(), plans.end()),
                                         timed, counting_seconds, counts_from, every, unhooks);
          },
          py::arg("plans"), py::arg("timed"), py::arg("counting_seconds"), py::arg("counts_from") = 0,
          py::arg("every") = 1, py::arg("unhooks") = false)
      .def_property_readonly("live_bytes",
                             [](const Engine& engine) {
                               int64_t bytes = 0;
                               for (const auto& residency : engine.residencies) bytes += residency->wanted;
                               return bytes;
                             })
      .def_property_readonly("host_bytes", [](const Engine& e) { return e.mover->host_bytes(); })
      .def_property_readonly("host_peak_bytes", [](const Engine& e) { return e.mover->host_peak_bytes(); })
      .def_property_readonly("pool_failed", [](const Engine& e) { return e.pool_failed; })
      .def("poll",
           [](Engine& engine) {
             for (auto& residency : engine.residencies) residency->poll();
           })
      .def(
          "rates", [](Engine& engine, int device) { return engine.mover->rates(c10::DeviceIndex(device)); },
          py::call_guard<py::gil_scoped_release>())
      .def(
          "missing_host",
          [](const Engine& engine, const std::vector<std::pair<int64_t, int64_t>>& tensors) {
            return engine.mover->missing_host(tensors);
          },
          "Sizes of host memory that is missing for tensors, (bytes, itemsize) each.", py::arg("tensors"))
      .def(
          "add_host",
          [](Engine& engine, int device, int64_t bytes, const py::function& rest) {
            const auto mover = engine.mover;
            void* data = nullptr;
            std::exception_ptr error;
            {
              py::gil_scoped_release released;
              data = mover->allocate_host(c10::DeviceIndex(device), bytes, [&](double seconds) {
                py::gil_scoped_acquire acquired;
                try {
                  return rest(seconds).cast<bool>();
                } catch (...) {
                  error = std::current_exception();
                  return false;
                }
              });
            }
            if (error != nullptr) std::rethrow_exception(error);
            if (data != nullptr) mover->keep_host(data, bytes);
            return data != nullptr;
          },
          "Allocates so much in pieces, and calls `rest` with the seconds that each took, while others may have waited "
          "for the driver; it returns once the next may follow, or False to give up. False then, and where the system "
          "refuses.",
          py::arg("device"), py::arg("bytes"), py::arg("rest"))
      .def("codec_rate", [](Engine& engine, int device) { return engine.mover->codec_rate(c10::DeviceIndex(device)); })
      .def("streams", [](Engine& engine, int device) { return engine.mover->streams(c10::DeviceIndex(device)); })
      .def("staging", [](Engine& engine, int64_t bytes, int64_t itemsize,
                         double density) { return engine.mover->staging(bytes, itemsize, density); })
      .def("release", [](Engine& engine) { return engine.mover->release(); })
      .def("close", [](Engine& engine) { engine.mover->close(); });
  m.attr("joint_bytes") = kJointBytes;
  bind_testing(testing);
}

}  // namespace weft::offload
