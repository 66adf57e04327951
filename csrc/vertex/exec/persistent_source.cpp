#include "vertex/exec/persistent_source.h"

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <set>
#include <utility>

#include "jit/resident_sizes.jit.cuh"
#include "vertex/exec/cuda/persistent.jit.cuh"
#include "vertex/exec/script.h"
#include "vertex/program/source.h"

namespace weft::vertex {
namespace {

constexpr const char* kTypes[] = {"Float16", "BFloat16", "float", "double"};
constexpr int kWarps = kPersistentThreads / 32;

bool is_product(const Partition& partition, size_t i) {
  return partition.shares[i].runs && partition.steps[i]->kind == Step::Kind::kProduct;
}

std::string columns_of(const Share& share, int32_t blocks) {
  std::string text = "DealtColumns<" + std::to_string(blocks);
  for (const Segment& g : share.segments) text += ", " + std::to_string(g.first) + ", " + std::to_string(g.width);
  return text + ">";
}

ResidentSizes sizes_of(const Program& program, const Step& s, const Share& share) {
  const Buffer& source = program.buffers[s.source];
  return {source.width, share.columns, kWarps, is_half(source.dtype) ? 2 : 4};
}

// The kernel that may follow a product in one instruction; -1 where none does.
int paired_kernel(const Partition& partition, size_t product) {
  for (size_t k = 0; k < partition.steps.size(); ++k) {
    const Share& share = partition.shares[k];
    if (!share.runs || share.segments.empty() || partition.steps[k]->width == 0) continue;
    if (!pairs(partition, static_cast<int32_t>(product), static_cast<int32_t>(k))) continue;
    return share.columns <= kMostPairElements ? static_cast<int>(k) : -1;
  }
  return -1;
}

// Of a pass, in shared memory. The parts of a training step, before the frontiers, forward and backward, take the place
// of each other's weights where there is no room for all.
struct Room {
  static constexpr int kParts = 3;
  int64_t sums = 0, partials = 0, weights = 0;
  std::array<int64_t, kParts> of{};  // all weights of a part
  std::array<bool, kParts> turns{};  // they are loaded when it begins
  std::vector<int64_t> places;       // of weights, by step

  Room(const Program& program, const Partition& partition, int32_t classes, int64_t shared_limit,
       bool warpgroups = false) {
    partials = int64_t{kWarps} * (classes + 2) * 4;
    std::vector<std::pair<size_t, ResidentSizes>> products;
    for (size_t i = 0; i < partition.steps.size(); ++i) {
      if (!is_product(partition, i)) continue;
      const Share& share = partition.shares[i];
      const ResidentSizes& sizes = products.emplace_back(i, sizes_of(program, *partition.steps[i], share)).second;
      if (paired_kernel(partition, i) >= 0) sums = std::max<int64_t>(sums, int64_t{kMostPairRows} * share.columns * 4);
      partials = std::max<int64_t>(partials, sizes.partial_bytes);
      of[part(partition, i)] += sizes.weight_bytes;
    }
    sums = (sums + 15) / 16 * 16;
    partials = (partials + 15) / 16 * 16;
    const int64_t for_all = std::min(int64_t{160} << 10, shared_limit - before_weights()), first = of[0] + of[1];
    turns[1] = of[0] > 0 && first > for_all;
    turns[2] = first > 0 && first + of[2] > for_all;
    std::array<int64_t, kParts> next{0, turns[1] ? 0 : of[0], turns[2] ? 0 : first};
    places.resize(partition.steps.size());
    for (const auto& [i, sizes] : products) {
      int64_t& at = next[part(partition, i)];
      places[i] = at;
      at += sizes.weight_bytes;
      weights = std::max(weights, at);
    }
    // Gradients take the place of all that.
    if (partition.pass == Pass::kTraining) weights = std::max(weights, outer_shared(warpgroups) - partials);
  }
  static int part(const Partition& partition, size_t step) {
    if (step >= partition.forward_steps) return 2;
    return partition.steps[step]->when == Step::When::kBefore ? 0 : 1;
  }
  int64_t before_weights() const {
    return kScriptWindow * static_cast<int64_t>(sizeof(ScriptInstruction)) + sums + partials;
  }
  int64_t bytes() const { return before_weights() + weights; }
};

constexpr const char* kAwait = "await_weights(loading); ";

std::string label(size_t step, ScriptInstruction::Op op) {
  static_assert(ScriptInstruction::kOps <= 8);
  return " case " + std::to_string(step * 8 + op) + ": ";
}

class SourceWriter {
 public:
  SourceWriter(const Program& program, const Partition& partition, bool tf32)
      : program_(program), partition_(partition), tf32_(tf32), all_(program.buffers.size()) {
    std::iota(all_.begin(), all_.end(), 0);
  }

  void write(const Room& room) {
    for (size_t i = 0; i < partition_.steps.size(); ++i) {
      if (!partition_.shares[i].runs) continue;
      switch (partition_.steps[i]->kind) {
        case Step::Kind::kKernel:
          kernel(i);
          break;
        case Step::Kind::kProduct: {
          const int part = Room::part(partition_, i);
          product(i, room, room.turns[part] ? turns[part] : loads);
          break;
        }
        case Step::Kind::kOuter:
          outer(i);
          break;
        case Step::Kind::kTotal:
          total(i);
          break;
      }
    }
  }

  std::string types, loads, cases;
  std::array<std::string, Room::kParts> turns;  // loads when a part begins
  int units = 0;                                // of work of all gradients

 private:
  static std::string buffer(int32_t b) { return "buffers.of[" + std::to_string(b) + "]"; }
  Step of_all(size_t i) const {
    Step kernel = *partition_.steps[i];
    kernel.buffers = all_;
    return kernel;
  }

  // Of many rows a thread has several columns of one, so that it does not wait for the stores of one before it asks for
  // the operands of the next.
  void kernel(size_t i) {
    const Step step = of_all(i);
    for (const bool leaves : {false, true}) {
      if (leaves && (step.edges || step.leaf_code.empty())) continue;
      const auto body = [&](int each) {
        return kernel_parts(program_, step, leaves, {&partition_.published, -1, {}}, each).all() + " }";
      };
      cases += label(i, leaves ? ScriptInstruction::kRunLeaves : ScriptInstruction::kRun) +
               "{ constexpr int columns = " + std::to_string(step.width) + ";";
      if (step.reduces) {
        cases +=
            " constexpr int lanes = 32; const int lane = threadIdx.x % 32; for (int i = rank * kWarps + "
            "threadIdx.x / 32; i < count; i += kBlocks * kWarps) { const long long index = first + i; ";
      } else {
        const int count = std::max(1, partition_.shares[i].columns);
        const std::string units = std::to_string(count);
        const int each = step.width % count != 0 ? 1 : leaves && count % 4 == 0 ? 4 : count % 2 == 0 ? 2 : 1;
        if (each > 1) {
          const std::string lanes = std::to_string(count / each);
          cases += " if (count * " + units + " > kPersistentThreads) { constexpr int lanes = " + lanes +
                   "; for (int i = threadIdx.x; i < count * lanes; i += kPersistentThreads) { const int j = rank * " +
                   units + " + i % lanes; if (j >= columns) continue; const long long index = first + i / lanes; " +
                   body(each) + " break; }";
        }
        cases += " for (int i = threadIdx.x; i < count * " + units +
                 "; i += kPersistentThreads) { const int j = rank * " + units + " + i % " + units +
                 "; if (j >= columns) continue; const long long index = first + i / " + units + "; ";
      }
      cases += body(1) + " } break;";
    }
    if (std::find(partition_.blanks.begin(), partition_.blanks.end(), static_cast<int32_t>(i)) !=
        partition_.blanks.end())
      blank(i);
  }

  // Of each column of the schedule in which a row has no child.
  void blank(size_t i) {
    const std::string units = std::to_string(std::max(1, partition_.shares[i].columns));
    const Step& s = *partition_.steps[i];
    cases += label(i, ScriptInstruction::kBlank) + "for (int i = threadIdx.x; i < count * " + units +
             "; i += kPersistentThreads) { const int j = rank * " + units + " + i % " + units +
             "; if (j >= " + std::to_string(s.width) + ") continue; const long long row = first + i / " + units + ";";
    for (const Instruction& x : s.code) {
      if (!gives_published(partition_, x)) continue;
      const std::string b = std::to_string(x.buffer), type = kTypes[static_cast<int>(program_.buffers[x.buffer].dtype)];
      cases += " if (gather[" + std::to_string(x.gather) + " * num_vertices + row] < 0) publish(data(" + type + ", " +
               b + ")[row * stride(" + b + ") + " + std::to_string(x.column) + " + j], 0.0f);";
    }
    cases += " } break;";
  }

  void product(size_t i, const Room& room, std::string& load) {
    const Step& s = *partition_.steps[i];
    const Share& share = partition_.shares[i];
    const Buffer& source = program_.buffers[s.source];
    const std::string type = kTypes[static_cast<int>(source.dtype)], n = std::to_string(i), from = buffer(s.source),
                      to = buffer(s.target), matrix = "matrices.of[" + std::to_string(s.matrix) + "]",
                      data = "static_cast<const " + type + "*>(" + matrix + ".data)",
                      strides = matrix + (s.transposed ? ".column, " : ".row, ") + matrix +
                                (s.transposed ? ".row" : ".column"),
                      four = "FourOf<" + type + ">*>(shared + ",
                      at = std::to_string(room.before_weights() + room.places[i]);
    const char* how = is_half(source.dtype) ? "kHalf" : tf32_ ? "kTf32" : "kFloat";
    const std::string published = partition_.published[s.source] ? ", true" : ", false";
    types += "using Product" + n + " = ResidentProduct<" + type + ", Multiply::" + how + ", kPersistentThreads, " +
             std::to_string(source.width) + ", " + columns_of(share, partition_.blocks) + published + ">; ";
    load += " Product" + n + "::load(" + data + ", " + strides + ", rank, reinterpret_cast<" + four + at + "));";
    const std::string weights = "reinterpret_cast<const " + four + at + ")";
    const std::string bias = s.bias < 0 ? "nullptr" : "static_cast<const " + type + "*>(" + buffer(s.bias) + ".data)";
    cases += label(i, ScriptInstruction::kRun) + kAwait + "product<Product" + n + ", " + type + ">(" + from + ", " +
             to + ", first, count, rank, " + weights + ", partials, " + bias + "); break;";
    pair(i, type, from + ", " + to + ", rank, " + weights + ", partials, sums");
    if (s.zeroes_leaves) {
      cases += label(i, ScriptInstruction::kZero) + "zero<" + columns_of(share, partition_.blocks) + ", " + type +
               ">(" + to + ", first, count, rank); break;";
    }
  }

  // Product `number`, of such elements, and the kernel that may follow it in one instruction.
  void pair(size_t number, const std::string& type, const std::string& operands) {
    const int found = paired_kernel(partition_, number);
    if (found < 0) return;
    const auto k = static_cast<size_t>(found);
    const Share& share = partition_.shares[k];
    const Step kernel = of_all(k);
    Placed placed{&partition_.published,
                  partition_.steps[number]->target,
                  {},
                  {},
                  "(q >= instruction.first && q < instruction.first + instruction.count)",
                  share.columns};
    int32_t local = 0;
    for (const Segment& g : partition_.shares[number].segments) {
      const auto sum = [&](const std::string& row) {
        return "sums[" + row + " * Product" + std::to_string(number) + "::kColumns + " + std::to_string(local) +
               " + local]";
      };
      if (g.width == kernel.width) {
        // On the same rows, or on those that the product's rows read.
        if (k > number) placed.sums.emplace_back(g.first, sum("pair"));
        placed.used_sums.emplace_back(g.first, sum("(q - instruction.first)"));
      }
      local += g.units(partition_.blocks);
    }
    const Parts body = kernel_parts(program_, kernel, /*leaves=*/false, placed);
    const auto statements = [](const std::string& text) { return ", [&] {" + text + " }"; };
    const std::string n = std::to_string(number);
    cases += label(number, ScriptInstruction::kPair) + kAwait +
             "{ constexpr int columns = " + std::to_string(kernel.width) + "; int pair, local, j, index;" +
             body.declared + body.declared_ahead + " pairs<Product" + n + ", " + type + ", " + n + ", " +
             std::to_string(share.columns) + ", columns, " + (k > number ? "true" : "false") +
             ">(instruction, window, at, " + operands + ", Place{pair, local, j, index}" + statements(body.asked()) +
             statements(body.indices + body.use) + statements(body.early + body.early_use) +
             ", [&](int next) { row_ahead = next;" + body.ahead + " }" + statements(body.taken + body.use) +
             statements(body.meanwhile) + statements(body.late) + "); } break;";
  }

  // Whether a gradient is the first and the last of the terms of its matrix or vector, as template arguments.
  std::string terms(size_t i) const {
    const Step& s = *partition_.steps[i];
    const auto same = [&](size_t k) {
      const Step& t = *partition_.steps[k];
      return partition_.shares[k].runs && is_same_gradient(s, t);
    };
    bool first = true, last = true;
    for (size_t k = 0; k < partition_.steps.size(); ++k) {
      first &= k >= i || !same(k);
      last &= k <= i || !same(k);
    }
    return std::string(first ? ", true" : ", false") + (last ? ", true" : ", false");
  }

  // Where the units of work of a gradient begin: all its terms have the same.
  int first_unit(std::map<int32_t, int>& known, int32_t number, int count) {
    const auto [found, is_new] = known.try_emplace(number, units);
    if (is_new) units += count;
    return found->second;
  }

  void outer(size_t i) {
    const Step& s = *partition_.steps[i];
    // Rows of the matrix are columns of the left factor.
    const int32_t left = s.transposed ? s.target : s.source, right = s.transposed ? s.source : s.target;
    const int32_t rows = program_.buffers[left].width, columns = program_.buffers[right].width;
    const auto tiles = [](int32_t width) { return (width + kOuterTile - 1) / kOuterTile; };
    const int first = first_unit(of_matrices_, s.matrix, tiles(rows) * tiles(columns));
    const std::string matrix = "matrices.of[" + std::to_string(s.matrix) + "]";
    cases += label(i, ScriptInstruction::kRun) + kAwait + "outer<" + std::to_string(rows) + ", " +
             std::to_string(columns) + ", " + std::to_string(first) + terms(i) + ">(" + buffer(left) + ", " +
             buffer(right) + ", first, count, " + matrix + ".row, " + matrix + ".column, updates.of[" +
             std::to_string(s.matrix) + "], refused, reinterpret_cast<float*>(partials)); break;";
  }

  void total(size_t i) {
    const Step& s = *partition_.steps[i];
    const auto is_vector = [&](const Buffer& b) { return b.space == Space::kVector && b.index == s.vector; };
    const auto found = std::find_if(program_.buffers.begin(), program_.buffers.end(), is_vector);
    const int32_t elements = found == program_.buffers.end() ? s.first + s.width : found->width;
    const int first = first_unit(of_vectors_, s.vector, (elements + kTotalColumns - 1) / kTotalColumns);
    cases += label(i, ScriptInstruction::kRun) + kAwait + "total<" + std::to_string(elements) + ", " +
             std::to_string(first) + terms(i) + ">(" + buffer(s.source) + ", first, count, " +
             std::to_string(s.column) + ", " + std::to_string(s.width) + ", " + std::to_string(s.first) +
             ", updates.of[kMatrices + " + std::to_string(s.vector) +
             "], refused, reinterpret_cast<float*>(partials)); break;";
  }

  const Program& program_;
  const Partition& partition_;
  bool tf32_;
  std::vector<int32_t> all_;
  std::map<int32_t, int> of_matrices_, of_vectors_;
};

// The first of a space.
int32_t find_buffer(const Program& program, Space space) {
  for (size_t b = 0; b < program.buffers.size(); ++b) {
    if (program.buffers[b].space == space) return static_cast<int32_t>(b);
  }
  return -1;
}

std::string room_obstacle(const Program& program, const Partition& part, int64_t shared_limit, int32_t classes,
                          const char* name) {
  const Room room(program, part, classes, shared_limit);
  if (room.bytes() <= shared_limit) return {};
  const int64_t keeps = std::max<int64_t>(0, shared_limit - room.before_weights());
  return std::string("the weights of the ") + name + " take " + std::to_string(room.weights * part.blocks) +
         " bytes, " + std::to_string(part.blocks) + " blocks keep " + std::to_string(keeps * part.blocks);
}

std::string parameters_obstacle(const Program& program, size_t others) {
  const size_t bytes = sizeof(PersistentArguments) + program.buffers.size() * sizeof(BufferArgument) + others;
  if (bytes <= size_t{kMaxParameterBytes}) return {};
  return std::to_string(program.buffers.size()) + " buffers are more than a kernel takes";
}

}  // namespace

PersistentSource persistent_source(const Program& program, const Partition& partition, bool tf32, int64_t shared_limit,
                                   int32_t matrices, int32_t vectors, const LossForm& form, bool warpgroups) {
  const bool training = partition.pass == Pass::kTraining;
  Room room(program, partition, training ? form.classes : 0, shared_limit, warpgroups);
  if (warpgroups && room.bytes() > shared_limit) {
    warpgroups = false;
    room = Room(program, partition, training ? form.classes : 0, shared_limit);
  }
  SourceWriter writer(program, partition, tf32);
  writer.write(room);
  PersistentSource found;
  const auto define = [&](const char* name, const std::string& text) {
    found.defines.push_back("WEFT_VERTEX_" + std::string(name) + "=" + text);
  };
  define("TYPE", "float");
  define("BUFFERS", std::to_string(std::max<size_t>(1, program.buffers.size())));
  define("MATRICES", std::to_string(std::max(1, matrices)));
  define("BLOCKS", std::to_string(partition.blocks));
  define("PRODUCTS", writer.types);
  define("WEIGHTS", writer.loads);
  define("SUMS", std::to_string(room.sums));
  define("STEPS", writer.cases);
  if (training) {
    define("TURN", "if (instruction.first == 1) {" + writer.turns[1] + " } else {" + writer.turns[2] + " }");
    define("WARPGROUPS", warpgroups ? "1" : "0");
    define("HEAD_TURN", std::to_string(writer.units));
    const int32_t output = find_buffer(program, Space::kOutput);
    define("UPDATES", std::to_string(std::max(1, matrices) + vectors + 2));
    define("VECTORS", std::to_string(vectors));
    define("OUTPUT", std::to_string(output));
    define("OUTPUT_GRAD", std::to_string(find_buffer(program, Space::kOutputGrad)));
    define("OUTPUTS", std::to_string(program.buffers[output].width));
    define("CROSS_ENTROPY", form.cross_entropy ? "1" : "0");
    define("HEAD", form.head ? "1" : "0");
    define("CLASSES", std::to_string(form.classes));
  }
  found.shared_bytes = room.bytes();
  return found;
}

std::vector<Kept> kept_by_a_block(const Program& program, const Partition& partition) {
  std::vector<Kept> found;
  for (size_t i = 0; i < partition.steps.size(); ++i) {
    if (!is_product(partition, i)) continue;
    const Step& s = *partition.steps[i];
    const Buffer& source = program.buffers[s.source];
    const int64_t of_matrix = int64_t{source.width} * program.buffers[s.target].width * (is_half(source.dtype) ? 2 : 4);
    found.push_back({s.matrix, sizes_of(program, s, partition.shares[i]).weight_bytes, of_matrix});
  }
  return found;
}

std::string persistent_obstacle(const Program& program, int32_t most_blocks, int64_t shared_limit, int32_t matrices) {
  if (std::string why = script_obstacle(program); !why.empty()) return why;
  const auto others = static_cast<size_t>(std::max(1, matrices)) * sizeof(MatrixArgument);
  if (std::string why = parameters_obstacle(program, others); !why.empty()) return why;
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    const char* name = pass == Pass::kForward ? "forward pass" : "backward pass";
    std::string why = room_obstacle(program, partition_of(program, pass, most_blocks), shared_limit, 0, name);
    if (!why.empty()) return why;
  }
  return {};
}

std::string training_obstacle(const Program& program, int32_t most_blocks, int64_t shared_limit, int32_t matrices,
                              int32_t vectors, const LossForm& form) {
  if (std::string why = script_obstacle(program); !why.empty()) return why;
  const size_t updates = static_cast<size_t>(std::max(1, matrices)) + static_cast<size_t>(vectors) + 2;
  const size_t others = sizeof(TrainingArguments) + updates * sizeof(UpdateArgument) +
                        static_cast<size_t>(std::max(1, matrices)) * sizeof(MatrixArgument);
  if (std::string why = parameters_obstacle(program, others); !why.empty()) return why;
  std::set<int32_t> outputs, output_grads;  // several functions may push the same, each by a gradient of its own
  for (const Buffer& b : program.buffers) {
    if (b.dtype != DType::f32) return "it is not float32 alone";
    if (b.space == Space::kOutput) outputs.insert(b.index);
    if (b.space == Space::kOutputGrad) output_grads.insert(b.index);
  }
  if (outputs.size() != 1 || outputs != output_grads) return "what is pushed is not one output of the frontiers";
  if (form.classes < 1 || form.classes > 1024) return std::to_string(form.classes) + " classes";
  return room_obstacle(program, partition_of(program, Pass::kTraining, most_blocks), shared_limit, form.classes,
                       "training step");
}

}  // namespace weft::vertex
