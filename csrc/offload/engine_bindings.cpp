// The offload engine, as Python sees it: an Engine per offload object, a Use per `with` block, a Packed per saved
// tensor.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <ranges>

#include "offload/ledger.h"

namespace weft::offload {
namespace {

// Seconds of each operation without what it waited: between the marks that were made and have passed. None before.
std::optional<std::vector<double>> seconds(const Ledger& ledger) {
  std::vector<double> result;
  const Mark* last = nullptr;
  for (const MarkPtr& mark : ledger.marks) {
    if (mark != nullptr && !mark->passed()) return std::nullopt;
    if (&mark == &ledger.marks.front()) {
      last = mark.get();
      continue;
    }
    result.push_back(mark != nullptr && last != nullptr ? mark->since(*last) : 0);
    if (mark != nullptr) last = mark.get();
  }
  // The last operation has no end yet where its tensors are still held.
  const size_t operations = size_t(ledger.forward == 0 ? ledger.saves + 1 : ledger.forward + ledger.reads);
  result.resize(operations, 0);
  for (const Stall& stall : ledger.stalls) {
    if (!stall.end->passed()) return std::nullopt;
    // The time of an operation whose end has no mark is with the next one that has.
    size_t k = size_t(stall.operation);
    while (k + 1 < ledger.marks.size() && ledger.marks[k + 1] == nullptr) ++k;
    if (k < operations) result[k] -= stall.end->since(*stall.begin);
  }
  for (double& s : result) s = std::max(s, 0.0);
  return result;
}

// Whether all marks have passed; of each stream the last is asked.
bool passed(const Ledger& ledger) {
  c10::SmallVector<const void*, 4> asked;
  for (const MarkPtr& mark : std::views::reverse(ledger.marks)) {
    if (mark == nullptr || std::ranges::find(asked, mark->stream()) != asked.end()) continue;
    if (!mark->passed()) return false;
    asked.push_back(mark->stream());
  }
  return true;
}

py::dict books(const Ledger& ledger) {
  py::dict d;
  const Totals& t = ledger.totals;
  d["device"] = ledger.account.device.str();
  d["budgeted"] = ledger.account.budgeted;
  d["saved_bytes"] = t.saved_bytes, d["saved_tensors"] = t.saved_tensors;
  d["moved_bytes"] = t.moved_bytes, d["moved_tensors"] = t.moved_tensors;
  d["compressed_tensors"] = t.compressed_tensors;
  d["peak_bytes"] = ledger.peak, d["peak_bytes_without"] = ledger.peak_without;
  auto kept = t.kept;
  for (const auto& record : ledger.latest)
    if (!record->moved && record->reason == kBudget) kept[kBudget] -= record->bytes, kept[kLast] += record->bytes;
  py::dict reasons;
  for (size_t i = 0; i < kReasons; ++i) reasons[kReasonNames[i]] = kept[i];
  d["kept"] = reasons;

  py::list stalls;
  for (const Stall& s : ledger.stalls)
    if (const double waited = s.end->passed() ? s.end->since(*s.begin) : 0; waited > 0)
      stalls.append(py::make_tuple(s.forward, s.operation, s.name, waited));
  d["stalls"] = stalls;
  // (out, begin, end, bytes, whether compressed) since the first mark; None where there is no such mark.
  py::list copies;
  const MarkPtr first = ledger.marks.empty() ? nullptr : ledger.marks.front();
  const MarkPtr origin = first != nullptr && first->passed() ? first : nullptr;
  int64_t crossed[] = {t.returned_bytes, t.sent_bytes};
  for (const auto& [out, sent, begin, end] : ledger.spans) {
    crossed[out] += sent.bytes();
    if (origin == nullptr || begin == nullptr || end == nullptr || !end->passed()) continue;
    const bool compressed = !sent.parts.empty();
    copies.append(py::make_tuple(out, begin->since(*origin), end->since(*origin), sent.bytes(), compressed));
  }
  d["sent_bytes"] = crossed[1], d["returned_bytes"] = crossed[0];
  d["copies"] = copies;
  py::list curve;
  for (size_t i = 0; i < ledger.marks.size(); ++i)
    if (ledger.marks[i] != nullptr && origin != nullptr && ledger.marks[i]->passed())
      curve.append(py::make_tuple(ledger.marks[i]->since(*origin), ledger.curve[i]));
  d["curve"] = curve;
  return d;
}

double density(const Record& record) {
  int64_t n = 0, nonzeros = 0;
  for (const Count& count : record.counts)
    if (count.nonzeros != nullptr) n += count.n, nonzeros += *count.nonzeros;
  return n == 0 ? 1 : std::clamp(double(nonzeros) / double(n), 0.0, 1.0);
}

// (operations, their seconds or None, operations of the forward, tensors, per tensor: bytes of its first save,
// itemsize, whether it may move, whether its density is known). A tensor that nobody read counts to the end.
py::tuple timeline(const Ledger& ledger) {
  const int64_t forward = ledger.forward == 0 ? ledger.saves + 1 : ledger.forward;
  const int64_t operations = std::max(forward + ledger.reads, forward + 1);
  auto times = seconds(ledger);
  if (times) times->resize(size_t(operations), 0);
  py::list tensors, first;
  for (const auto& r : ledger.timeline) {
    const int64_t end = operations - 1;
    tensors.append(py::make_tuple(r->uncounted ? 0 : r->bytes, r->number, r->first_read < 0 ? end : r->first_read,
                                  r->first_read < 0 ? end : r->last_read, density(*r), r->itemsize));
    first.append(py::make_tuple(r->first_bytes, r->itemsize, r->reason == kBudget || r->reason == kPool || r->moved,
                                !r->counts.empty()));
  }
  return py::make_tuple(operations, times ? py::cast(*times) : py::none(), forward, tensors, first);
}

Codec codec(const std::optional<std::string>& name) {
  if (!name) return Codec::none;
  return *name == "auto" ? Codec::automatic : *name == "zvc" ? Codec::zvc : Codec::rle;
}

// One tensor's way to the host and back, as the ledger has it moved: for benchmarks.
struct Trip {
  std::shared_ptr<Parcel> parcel;
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

// Whoever has the trip keeps the tensors, which nothing else knows to be in use.
void bind_testing(py::module_ testing) {
  testing.def(
      "offload_refuse",
      [](int64_t host, int64_t device) {
        refusals().host = host;
        refusals().device = device;
      },
      "So many of the next allocations fail: of host memory, of memory on the device for what comes back and the "
      "codec.",
      py::arg("host") = 0, py::arg("device") = 0);
#ifdef WEFT_WITH_CUDA
  testing.def(
      "offload_stages",
      [](int64_t segment, int pack, int spread) {
        if (segment < 0 || segment % 128 != 0 || pack < 0 || spread < 0)
          throw py::value_error("segment must be a multiple of 128 bytes, the numbers of blocks not negative");
        set_stages(segment, pack, spread);
      },
      "How the codecs of objects made from now on work beside copies.", py::arg("segment") = 0, py::arg("pack") = 0,
      py::arg("spread") = 0);
#endif
  py::class_<Trip>(testing, "OffloadTrip")
      .def(py::init(
               [](std::shared_ptr<Engine> engine, const at::Tensor& x, bool compressed, double density, double share) {
                 auto parcel = engine->mover->out(bytes_of(*engine, x), compressed ? Codec::zvc : Codec::none, nullptr,
                                                  density, share);
                 if (parcel == nullptr) throw std::runtime_error("no host memory for the tensor");
                 return Trip{std::move(parcel), x.device(), int64_t(x.nbytes())};
               }),
           py::arg("engine"), py::arg("x"), py::arg("compressed"), py::arg("density"), py::arg("share") = 1.0,
           py::keep_alive<1, 2>(), py::keep_alive<1, 3>())
      .def(
          "bring_back",
          [](Trip& trip, const Engine& engine, const at::Tensor& to) {
            if (to.device() != trip.device || int64_t(to.nbytes()) != trip.bytes)
              throw py::value_error("to must be as large as what went out, and on its device");
            trip.parcel->start_in(bytes_of(engine, to), nullptr);
          },
          py::arg("engine"), py::arg("to"), py::keep_alive<1, 3>())
      .def_property_readonly("sent_bytes", [](const Trip& trip) { return trip.parcel->sent.bytes(); });
}

// ---- The pair of hooks. What they are called for is every saved tensor of a step, so that pybind11's objects and its
// dispatch would be most of their time.

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

void bind_engine(py::module_& m) {
#ifdef WEFT_WITH_CUDA
  m.def("offload_has_managed", &has_managed, "Whether host and device may use managed memory at the same time.",
        py::arg("device"));
#else
  m.def(
      "offload_has_managed", [](int) { return false; }, py::arg("device"));
#endif
  py::class_<Schedule, std::shared_ptr<Schedule>>(m, "OffloadSchedule")
      .def(py::init([](const std::vector<std::tuple<int64_t, int64_t, bool, double, double>>& tensors,
                       std::vector<std::pair<int64_t, int64_t>> back, int64_t room) {
             auto schedule = std::make_shared<Schedule>();
             for (const auto& [bytes, itemsize, moves, share, density] : tensors)
               schedule->tensors.push_back({bytes, itemsize, moves, share, density});
             schedule->back = std::move(back);
             schedule->room = room;
             return schedule;
           }),
           py::arg("tensors"), py::arg("back"), py::arg("room"));
  py::class_<Use, std::shared_ptr<Use>>(m, "OffloadUse")
      .def_property_readonly("hooks", &hooks)
      .def("exit", &Use::exit)
      .def_property_readonly("finished", &Use::finished)
      .def_readonly("timed", &Use::timed)
      .def_readonly("slow", &Use::slow)
      .def_property_readonly(
          "passed",
          [](const Use& use) { return std::ranges::all_of(use.ledgers, [](const auto& l) { return passed(*l); }); })
      .def("books",
           [](const Use& use) {
             py::list list;
             for (const auto& ledger : use.ledgers) list.append(books(*ledger));
             return list;
           })
      .def("timelines",
           [](const Use& use) {
             py::list list;
             for (const auto& ledger : use.ledgers) {
               const auto device = ledger->account.device;
               list.append(py::make_tuple(device.is_cpu() ? -1 : int(device.index()), ledger->account.budgeted,
                                          timeline(*ledger)));
             }
             return list;
           })
      .def("planned", [](const Use& use) {
        return std::ranges::all_of(use.ledgers, [](const auto& ledger) { return ledger->planned(); });
      });
  py::class_<Engine, std::shared_ptr<Engine>>(m, "OffloadEngine")
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
          [](std::shared_ptr<Engine> engine, std::map<int, std::shared_ptr<Schedule>> schedules, bool timed,
             bool counts) {
            return std::make_shared<Use>(
                std::move(engine), std::map<int, std::shared_ptr<const Schedule>>(schedules.begin(), schedules.end()),
                timed, counts);
          },
          py::arg("schedules"), py::arg("timed"), py::arg("counts"))
      .def_property_readonly("live_bytes",
                             [](const Engine& engine) {
                               int64_t bytes = 0;
                               for (const auto& account : engine.accounts) bytes += account->wanted;
                               return bytes;
                             })
      .def_property_readonly("host_bytes", [](const Engine& e) { return e.mover->host_bytes(); })
      .def_property_readonly("host_peak_bytes", [](const Engine& e) { return e.mover->host_peak_bytes(); })
      .def_property_readonly("pool_failed", [](const Engine& e) { return e.pool_failed; })
      .def("poll",
           [](Engine& engine) {
             for (auto& account : engine.accounts) account->poll();
           })
      .def("rates", [](Engine& engine, int device) { return engine.mover->rates(c10::DeviceIndex(device)); })
      .def("codec_rate", [](Engine& engine, int device) { return engine.mover->codec_rate(c10::DeviceIndex(device)); })
      .def("streams", [](Engine& engine, int device) { return engine.mover->streams(c10::DeviceIndex(device)); })
      .def("staging", [](Engine& engine, int64_t bytes, int64_t itemsize,
                         double density) { return engine.mover->staging(bytes, itemsize, density); })
      .def("release", [](Engine& engine) { return engine.mover->release(); })
      .def("close", [](Engine& engine) { engine.mover->close(); });
  bind_testing(m.def_submodule("_testing"));
}

}  // namespace weft::offload
