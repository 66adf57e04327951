#include "vertex/program/partition.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

namespace weft::vertex {
namespace {

bool in_frontiers(const Step& s) {
  return s.when == Step::When::kFrontiers && (s.kind == Step::Kind::kKernel || s.kind == Step::Kind::kProduct);
}

// Of a training step all but the gradients of inputs.
bool runs(const Program& program, const Step& s, Pass pass) {
  if (pass != Pass::kTraining) return in_frontiers(s);
  return s.kind != Step::Kind::kProduct || program.buffers[s.target].space != Space::kInputGrad;
}

constexpr int32_t kNobody = -1, kAnybody = -2;

// Which block writes each column of a buffer.
using Owners = std::vector<int32_t>;

class Partitioner {
 public:
  Partitioner(const Program& program, Pass pass, int32_t most) : program_(program) {
    found_.pass = pass;
    if (pass != Pass::kBackward) take(program.forward);
    found_.forward_steps = found_.steps.size();
    if (pass != Pass::kForward) take(program.backward);
    int32_t widest = 1;
    for (size_t i = 0; i < found_.steps.size(); ++i) {
      const Step& s = step(i);
      if (runs(i) && s.kind == Step::Kind::kKernel && !s.reduces) widest = std::max(widest, s.width);
    }
    const int32_t units = (widest + most - 1) / most;
    found_.blocks = (widest + units - 1) / units;
  }

  Partition make() {
    const auto each = [&](const auto& work) {
      for (size_t i = 0; i < found_.steps.size(); ++i) {
        if (runs(i)) work(i, step(i));
      }
    };
    each([&](size_t i, const Step& s) { deal(i, s, found_.shares[i]); });
    each([&](size_t i, const Step&) { find_writes(i); });
    found_.published.resize(program_.buffers.size());
    each([&](size_t, const Step& s) {
      if (!in_frontiers(s) || s.kind != Step::Kind::kProduct) return;
      found_.published[s.source] = found_.blocks > 1 && is_all_written(s.source);
      found_.published_by_slots |= found_.published[s.source] && by_slots(s.source);
    });
    each([&](size_t i, const Step& s) {
      const bool gives =
          std::any_of(s.code.begin(), s.code.end(), [&](const Instruction& x) { return gives_published(found_, x); });
      if (in_frontiers(s) && gives && program_.functions == 1) found_.blanks.push_back(static_cast<int32_t>(i));
    });
    each([&](size_t i, const Step&) { find_reads(i); });
    return std::move(found_);
  }

 private:
  void take(const std::vector<Step>& steps) {
    for (const Step& s : steps) {
      const auto space = [&](int32_t b) { return program_.buffers[b].space; };
      const bool kernel = s.kind == Step::Kind::kKernel, two = !kernel && s.kind != Step::Kind::kTotal;
      found_.inner_only.push_back(!kernel &&
                                  (space(s.source) == Space::kInner || (two && space(s.target) == Space::kInner)));
      found_.of_edges.push_back(!kernel && space(s.source) == Space::kEdges);
      found_.steps.push_back(&s);
      found_.shares.emplace_back().runs = weft::vertex::runs(program_, s, found_.pass);
    }
  }
  const Step& step(size_t i) const { return *found_.steps[i]; }
  bool runs(size_t i) const { return found_.shares[i].runs; }
  template <typename Work>
  void kernels(const Work& work) const {
    for (size_t i = 0; i < found_.steps.size(); ++i) {
      if (runs(i) && step(i).kind == Step::Kind::kKernel && !step(i).reduces) work(step(i));
    }
  }

  void deal(size_t i, const Step& s, Share& share) const {
    share.by_rows = s.kind == Step::Kind::kKernel && s.reduces;
    if (share.by_rows) return;
    switch (s.kind) {
      case Step::Kind::kKernel:
        share.segments = {{0, s.width}};
        break;
      case Step::Kind::kProduct:
        share.segments = segments_of(s.target);
        break;
      case Step::Kind::kOuter:
      case Step::Kind::kTotal:
        break;  // in the end all blocks share the work
    }
    for (const Segment& g : share.segments) share.columns += g.units(found_.blocks);
  }

  // The columns of a product's target as its readers have them: each unit of a kernel reads the same column of several
  // pieces of it, as of the gates.
  std::vector<Segment> segments_of(int32_t target) const {
    const int32_t width = program_.buffers[target].width;
    std::vector<Segment> found;
    const auto add = [&](int64_t first, int32_t size) {
      const bool overlaps = std::any_of(found.begin(), found.end(), [&](const Segment& g) {
        return first < g.first + g.width && g.first < first + size;
      });
      if (first >= 0 && size > 0 && first + size <= width && !overlaps)
        found.push_back({static_cast<int32_t>(first), size});
    };
    kernels([&](const Step& s) {
      for (const Instruction& i : s.code) {
        if (i.op == Op::kLoad && i.buffer == target && !i.broadcast) add(i.column, s.width);
        if (i.op != Op::kUses) continue;
        for (const Use& use : program_.tables[i.table]) {
          if (use.buffer == target) add(int64_t{use.first} + i.column, s.width);
        }
      }
    });
    std::sort(found.begin(), found.end(), [](const Segment& a, const Segment& b) { return a.first < b.first; });
    std::vector<Segment> all;
    int32_t next = 0;
    for (const Segment& g : found) {
      if (next < g.first) all.push_back({next, g.first - next});
      all.push_back(g);
      next = g.first + g.width;
    }
    if (next < width) all.push_back({next, width - next});
    return all;
  }

  // The block that has column j of a step of this share, counted from the first of a kernel's columns, or of the
  // target's.
  int32_t owner(const Share& share, int32_t column) const {
    if (share.by_rows) return kAnybody;
    for (const Segment& g : share.segments) {
      if (column >= g.first && column < g.first + g.width) return (column - g.first) / g.units(found_.blocks);
    }
    return kNobody;
  }

  void write(size_t step, int32_t buffer, int64_t first, int32_t count, const Share& share, bool product) {
    Owners& owners = written_[{buffer, static_cast<int32_t>(step)}];
    owners.resize(program_.buffers[buffer].width, kNobody);
    for (int32_t j = 0; j < count; ++j) {
      const int32_t mine = owner(share, product ? static_cast<int32_t>(first) + j : j);
      int32_t& there = owners[first + j];
      there = there == kNobody || there == mine ? mine : kAnybody;
    }
  }

  void find_writes(size_t i) {
    const Step& s = step(i);
    Share& share = found_.shares[i];
    std::set<int32_t> stores, scatters;
    if (s.kind == Step::Kind::kProduct) {
      write(i, s.target, 0, program_.buffers[s.target].width, share, true);
      stores.insert(s.target);
    } else if (s.kind == Step::Kind::kKernel) {
      for (const Instruction& x : s.code) {
        if (!info(x.op).stores) continue;
        const bool one = x.op == Op::kStoreSum || x.op == Op::kStoreMax;
        write(i, x.buffer, x.column, one ? 1 : s.width, share, false);
        (x.op == Op::kScatter ? scatters : stores).insert(x.buffer);
      }
    }
    share.stores.assign(stores.begin(), stores.end());
    share.scatters.assign(scatters.begin(), scatters.end());
  }

  // Whether a block reads what another wrote. `by_unit`: column first + j where the reader has column j, else all of
  // them.
  bool crosses(const Share& share, int32_t buffer, int64_t first, int32_t count, bool by_unit) const {
    if (found_.blocks == 1) return false;
    for (const auto& [key, owners] : written_) {
      if (key.first != buffer) continue;
      for (int32_t j = 0; j < count; ++j) {
        const int32_t writer = owners[first + j];
        if (writer == kNobody) continue;
        if (!by_unit || share.by_rows || writer == kAnybody || writer != owner(share, j)) return true;
      }
    }
    return false;
  }

  bool by_slots(int32_t buffer) const {
    const Buffer& b = program_.buffers[buffer];
    return b.scattered && b.space != Space::kEdges;
  }

  // Whether products that read the buffer find all columns of all of their rows written in this pass, by every function
  // whose vertices these rows, or their children, are. They read four neighbours at a time.
  bool is_all_written(int32_t buffer) const {
    const Buffer& b = program_.buffers[buffer];
    if (b.width % 4 != 0) return false;
    // Later products over all rows find zeros in rows that nobody writes.
    if (b.scattered ? b.space != Space::kInner && b.space != Space::kEdges : program_.functions > 1) return false;
    for (int32_t f = 0; f < program_.functions; ++f) {
      std::vector<char> columns(b.width, 0);
      bool before = true, reads = false;  // of the products that read it
      for (const Step* each : found_.steps) {
        const Step& s = *each;
        if (!in_frontiers(s) || s.function != f) continue;
        if (s.kind == Step::Kind::kProduct) {
          if (s.target == buffer) return false;
          if (s.source == buffer) before = false, reads = true;
          continue;
        }
        for (const Instruction& i : s.code) {
          if (!info(i.op).stores || i.buffer != buffer) continue;
          if (i.op != (b.scattered ? Op::kScatter : Op::kStore)) return false;
          if (b.scattered || before) std::fill_n(columns.begin() + i.column, s.width, char{1});
        }
      }
      const bool all = std::find(columns.begin(), columns.end(), 0) == columns.end();
      if (!all && (b.scattered || reads)) return false;
    }
    return true;
  }

  void read(Share& share, int32_t buffer, bool published, bool own) {
    for (CrossRead& r : share.reads) {
      if (r.buffer != buffer) continue;
      r.own |= own;
      return;
    }
    share.reads.push_back({buffer, published, own});
  }

  void find_reads(size_t i) {
    const Step& s = step(i);
    Share& share = found_.shares[i];
    if (s.kind == Step::Kind::kOuter || s.kind == Step::Kind::kTotal) return;  // all blocks meet before these
    if (s.kind == Step::Kind::kProduct) {
      const Buffer& b = program_.buffers[s.source];
      if (crosses(share, s.source, 0, b.width, false)) read(share, s.source, found_.published[s.source] != 0, true);
      return;
    }
    for (const Instruction& x : s.code) {
      if (x.op == Op::kLoad) {
        const bool of_child = x.access == Access::kGather || x.access == Access::kChild;
        if (crosses(share, x.buffer, x.column, x.broadcast ? 1 : s.width, !x.broadcast)) {
          read(share, x.buffer, false, !of_child);
        }
      }
      if (x.op != Op::kUses) continue;
      for (const Use& use : program_.tables[x.table]) {
        if (crosses(share, use.buffer, int64_t{use.first} + x.column, s.width, true)) {
          read(share, use.buffer, false, false);
        }
      }
    }
  }

  const Program& program_;
  Partition found_;
  std::map<std::pair<int32_t, int32_t>, Owners> written_;  // by buffer and step
};

}  // namespace

const Partition& partition_of(const Program& program, Pass pass, int32_t most) {
  const std::lock_guard lock(program.partitions->mutex);
  std::unique_ptr<const Partition>& found = program.partitions->of[{static_cast<int64_t>(pass), most}];
  if (found == nullptr) found = std::make_unique<const Partition>(Partitioner(program, pass, most).make());
  return *found;
}

bool gives_published(const Partition& partition, const Instruction& i) {
  return i.op == Op::kScatter && i.gather >= 0 && partition.published[i.buffer];
}

bool is_same_gradient(const Step& a, const Step& b) {
  if (a.kind != b.kind) return false;
  if (a.kind == Step::Kind::kOuter) return a.matrix == b.matrix;
  return a.kind == Step::Kind::kTotal && a.vector == b.vector;
}

std::string script_obstacle(const Program& program) {
  if (program.doubles) return "float64";
  for (const auto* list : {&program.forward, &program.backward}) {
    for (const Step& s : *list) {
      if (!in_frontiers(s)) continue;
      if (s.kind == Step::Kind::kProduct && program.buffers[s.source].width == 0) return "a product of no columns";
      if (s.kind == Step::Kind::kProduct && s.bias >= 0) return "a product with a bias in the frontiers";
    }
  }
  return {};
}

}  // namespace weft::vertex
