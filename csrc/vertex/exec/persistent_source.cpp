#include "vertex/exec/persistent_source.h"

#include <algorithm>
#include <numeric>

#include "vertex/exec/cuda/persistent.jit.cuh"
#include "vertex/exec/script.h"
#include "vertex/program/source.h"

namespace weft::vertex {
namespace {

constexpr const char* kTypes[] = {"Float16", "BFloat16", "float", "double"};
constexpr int kWarps = kPersistentThreads / 32;

std::string columns_of(const Share& share, int32_t blocks) {
  std::string text = "DealtColumns<" + std::to_string(blocks);
  for (const Segment& g : share.segments) text += ", " + std::to_string(g.first) + ", " + std::to_string(g.width);
  return text + ">";
}

// As ResidentProduct in csrc/jit/resident_product.jit.cuh.
struct Sizes {
  int64_t weights, partials;
  Sizes(const Program& program, const Step& s, const Share& share) {
    const Buffer& source = program.buffers[s.source];
    const int64_t tiles = (share.columns + 15) / 16, chunks = (source.width + 15) / 16;
    const int64_t groups = tiles < 4 ? 4 / tiles : 1;
    weights = chunks * tiles * 256 * (source.dtype < Dtype::kFloat32 ? 2 : 4);
    partials = std::min<int64_t>(chunks, kWarps) * groups * 8 * (tiles * 16 + 4) * 4;
  }
};

// Of a pass, in shared memory.
struct Room {
  int64_t sums = 0, partials = 0, weights = 0;
  Room(const Program& program, bool backward, const Partition& partition) {
    const auto& steps = backward ? program.backward : program.forward;
    for (size_t i = 0; i < steps.size(); ++i) {
      const Share& share = partition.shares[i];
      if (share.segments.empty() || steps[i].kind != Step::Kind::kProduct) continue;
      const Sizes sizes(program, steps[i], share);
      sums = std::max<int64_t>(sums, int64_t{kMostPairRows} * share.columns * 4);
      partials = std::max(partials, sizes.partials);
      weights += sizes.weights;
    }
    sums = (sums + 15) / 16 * 16;
  }
  int64_t before_weights() const {
    return kScriptWindow * static_cast<int64_t>(sizeof(ScriptInstruction)) + sums + partials;
  }
};

std::string label(size_t step, ScriptInstruction::Op op) {
  static_assert(ScriptInstruction::kOps <= 8);
  return " case " + std::to_string(step * 8 + op) + ": ";
}

std::string kernel_text(const Program& program, const Step& step, size_t number, const Share& share,
                        const std::vector<int32_t>& all, const std::vector<char>& published) {
  Step kernel = step;
  kernel.buffers = all;
  std::string text;
  for (const bool leaves : {false, true}) {
    if (leaves && (step.edges || step.leaf_code.empty())) continue;
    text += label(number, leaves ? ScriptInstruction::kRunLeaves : ScriptInstruction::kRun) +
            "{ constexpr int columns = " + std::to_string(step.width) + ";";
    if (step.reduces) {
      text +=
          " constexpr int lanes = 32; const int lane = threadIdx.x % 32; for (int i = rank * kWarps + threadIdx.x / "
          "32; i < count; i += kBlocks * kWarps) { const long long index = first + i; ";
    } else {
      const std::string units = std::to_string(share.columns);
      text += " for (int i = threadIdx.x; i < count * " + units + "; i += kPersistentThreads) { const int j = rank * " +
              units + " + i % " + units + "; if (j >= columns) continue; const long long index = first + i / " + units +
              "; ";
    }
    const Parts body = kernel_parts(program, kernel, leaves, {&published});
    text += body.early + body.late + " } } break;";
  }
  return text;
}

// The kernel that may follow product `number` in one instruction, as statements that have its own in the middle.
std::string pair_text(const Program& program, bool backward, size_t number, const Partition& partition,
                      const std::vector<int32_t>& all, const std::string& product) {
  const auto& steps = backward ? program.backward : program.forward;
  const Step& p = steps[number];
  for (size_t k = 0; k < steps.size(); ++k) {
    if (k == number || partition.shares[k].segments.empty() || steps[k].width == 0) continue;
    if (!pairs(program, backward, static_cast<int32_t>(number), static_cast<int32_t>(k))) continue;
    const Share& share = partition.shares[k];
    if (share.columns > kMostPairElements) return {};
    Placed placed{&partition.published, p.target, {}};
    if (k > number) {  // on the same rows
      int32_t local = 0;
      for (const Segment& g : partition.shares[number].segments) {
        if (g.width == steps[k].width) {
          placed.sums.emplace_back(g.first, "sums[pair * Product" + std::to_string(number) + "::kColumns + " +
                                                std::to_string(local) + " + local]");
        }
        local += g.units(partition.blocks);
      }
    }
    Step kernel = steps[k];
    kernel.buffers = all;
    const Parts body = kernel_parts(program, kernel, /*leaves=*/false, placed);
    const std::string units = std::to_string(share.columns);
    return label(number, ScriptInstruction::kPair) + "{ constexpr int columns = " + std::to_string(kernel.width) +
           "; const int local = threadIdx.x % " + units + ", own = rank * " + units +
           " + local; const bool mine = int(threadIdx.x) < instruction.next_count * " + units +
           " && own < columns; const int pair = mine ? threadIdx.x / " + units +
           " : 0, j = mine ? own : 0; const long long index = instruction.next_first + pair; " + body.early + " " +
           product + " if (mine) { " + body.late + " } } break;";
  }
  return {};
}

}  // namespace

PersistentSource persistent_source(const Program& program, bool backward, const Partition& partition, bool tf32,
                                   int32_t matrices) {
  std::vector<int32_t> all(program.buffers.size());
  std::iota(all.begin(), all.end(), 0);
  const auto& steps = backward ? program.backward : program.forward;
  const Room room(program, backward, partition);
  const int64_t first_weights = room.before_weights();
  int64_t weights = first_weights;
  std::string types, loads, cases;
  for (size_t i = 0; i < steps.size(); ++i) {
    const Step& s = steps[i];
    const Share& share = partition.shares[i];
    if (s.when != Step::When::kFrontiers) continue;
    if (s.kind == Step::Kind::kKernel) cases += kernel_text(program, s, i, share, all, partition.published);
    if (s.kind != Step::Kind::kProduct || share.segments.empty()) continue;
    const Buffer& source = program.buffers[s.source];
    const std::string type = kTypes[static_cast<int>(source.dtype)], n = std::to_string(i),
                      from = "buffers.of[" + std::to_string(s.source) + "]",
                      to = "buffers.of[" + std::to_string(s.target) + "]",
                      matrix = "matrices.of[" + std::to_string(s.matrix) + "]", at = std::to_string(weights);
    const char* how = source.dtype < Dtype::kFloat32 ? "kHalf" : tf32 ? "kTf32" : "kFloat";
    types += "using Product" + n + " = ResidentProduct<" + type + ", Multiply::" + how + ", kPersistentThreads, " +
             std::to_string(source.width) + ", " + columns_of(share, partition.blocks) +
             (partition.published[s.source] ? ", true>; " : ">; ");
    loads += " Product" + n + "::load(static_cast<const " + type + "*>(" + matrix + ".data), " + matrix +
             (s.transposed ? ".column, " : ".row, ") + matrix + (s.transposed ? ".row" : ".column") +
             ", rank, reinterpret_cast<FourOf<" + type + ">*>(shared + " + at + "));";
    cases += label(i, ScriptInstruction::kRun) + "product<Product" + n + ", " + type + ">(" + from + ", " + to +
             ", first, count, rank, shared + " + at + ", partials); break;";
    cases += pair_text(program, backward, i, partition, all,
                       "few<Product" + n + ", " + type + ">(" + from + ", " + to + ", first, count, rank, shared + " +
                           at + ", partials, sums);");
    if (s.zeroes_leaves) {
      cases += label(i, ScriptInstruction::kZero) + "zero<" + columns_of(share, partition.blocks) + ", " + type + ">(" +
               to + ", first, count, rank); break;";
    }
    weights += Sizes(program, s, share).weights;
  }
  PersistentSource found;
  found.defines = {"WEFT_VERTEX_TYPE=float",
                   "WEFT_VERTEX_BUFFERS=" + std::to_string(std::max<size_t>(1, all.size())),
                   "WEFT_VERTEX_MATRICES=" + std::to_string(std::max(1, matrices)),
                   "WEFT_VERTEX_BLOCKS=" + std::to_string(partition.blocks),
                   "WEFT_VERTEX_PRODUCTS=" + types,
                   "WEFT_VERTEX_WEIGHTS=" + loads,
                   "WEFT_VERTEX_SUMS=" + std::to_string(room.sums),
                   "WEFT_VERTEX_STEPS=" + cases};
  found.shared_bytes = weights;
  found.weight_bytes = weights - first_weights;
  return found;
}

std::vector<Kept> kept_by_a_block(const Program& program, bool backward, const Partition& partition) {
  std::vector<Kept> found;
  const auto& steps = backward ? program.backward : program.forward;
  for (size_t i = 0; i < steps.size(); ++i) {
    const Share& share = partition.shares[i];
    if (steps[i].kind != Step::Kind::kProduct || share.segments.empty()) continue;
    found.push_back({steps[i].matrix, Sizes(program, steps[i], share).weights});
  }
  return found;
}

std::string persistent_obstacle(const Program& program, int32_t most_blocks, int64_t shared_limit, int32_t matrices) {
  if (std::string why = script_obstacle(program); !why.empty()) return why;
  const size_t parameters = sizeof(PersistentArguments) + program.buffers.size() * sizeof(BufferArgument) +
                            static_cast<size_t>(std::max(1, matrices)) * sizeof(MatrixArgument);
  if (parameters > size_t{kMaxParameterBytes}) {
    return std::to_string(program.buffers.size()) + " buffers are more than a kernel takes";
  }
  for (const bool backward : {false, true}) {
    const Partition& part = partition_of(program, backward, most_blocks);
    const Room room(program, backward, part);
    const int64_t free = shared_limit - room.before_weights();
    if (room.weights > free) {
      return "the weights of the " + std::string(backward ? "backward" : "forward") + " pass take " +
             std::to_string(room.weights * part.blocks) + " bytes, " + std::to_string(part.blocks) + " blocks keep " +
             std::to_string(std::max<int64_t>(0, free) * part.blocks);
    }
  }
  return {};
}

}  // namespace weft::vertex
