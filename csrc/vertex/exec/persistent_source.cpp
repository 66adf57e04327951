#include "vertex/exec/persistent_source.h"

#include <algorithm>
#include <numeric>

#include "vertex/exec/cuda/persistent.jit.cuh"
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

std::string label(size_t step, ScriptInstruction::Op op) {
  return " case " + std::to_string(step * 8 + op) + ": ";
}

std::string kernel_text(const Program& program, const Step& step, size_t number, const Share& share,
                        const std::vector<int32_t>& all) {
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
    text += kernel_body(program, kernel, leaves) + " } } break;";
  }
  return text;
}

}  // namespace

PersistentSource persistent_source(const Program& program, bool backward, const Partition& partition, bool tf32,
                                   int32_t matrices) {
  std::vector<int32_t> all(program.buffers.size());
  std::iota(all.begin(), all.end(), 0);
  const auto& steps = backward ? program.backward : program.forward;
  int64_t partials = 0;
  for (size_t i = 0; i < steps.size(); ++i) {
    if (!partition.shares[i].segments.empty() && steps[i].kind == Step::Kind::kProduct) {
      partials = std::max(partials, Sizes(program, steps[i], partition.shares[i]).partials);
    }
  }
  const int64_t first_weights = kScriptWindow * static_cast<int64_t>(sizeof(ScriptInstruction)) + partials;
  int64_t weights = first_weights;
  std::string types, loads, cases;
  for (size_t i = 0; i < steps.size(); ++i) {
    const Step& s = steps[i];
    const Share& share = partition.shares[i];
    if (s.when != Step::When::kFrontiers) continue;
    if (s.kind == Step::Kind::kKernel) cases += kernel_text(program, s, i, share, all);
    if (s.kind != Step::Kind::kProduct || share.segments.empty()) continue;
    const Buffer& source = program.buffers[s.source];
    const std::string type = kTypes[static_cast<int>(source.dtype)], n = std::to_string(i),
                      from = "buffers.of[" + std::to_string(s.source) + "]",
                      to = "buffers.of[" + std::to_string(s.target) + "]",
                      matrix = "matrices.of[" + std::to_string(s.matrix) + "]", at = std::to_string(weights);
    const char* how = source.dtype < Dtype::kFloat32 ? "kHalf" : tf32 ? "kTf32" : "kFloat";
    types += "using Product" + n + " = ResidentProduct<" + type + ", Multiply::" + how + ", kPersistentThreads, " +
             std::to_string(source.width) + ", " + columns_of(share, partition.blocks) + ">; ";
    loads += " Product" + n + "::load(static_cast<const " + type + "*>(" + matrix + ".data), " + matrix +
             (s.transposed ? ".column, " : ".row, ") + matrix + (s.transposed ? ".row" : ".column") +
             ", rank, reinterpret_cast<FourOf<" + type + ">*>(shared + " + at + "));";
    cases += label(i, ScriptInstruction::kRun) + "product<Product" + n + ", " + type + ">(" + from + ", " + to +
             ", first, count, rank, shared + " + at + ", partials); break;";
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
    int64_t all = 0, partials = 0;
    const auto& steps = backward ? program.backward : program.forward;
    for (size_t i = 0; i < steps.size(); ++i) {
      if (steps[i].kind != Step::Kind::kProduct || part.shares[i].segments.empty()) continue;
      const Sizes sizes(program, steps[i], part.shares[i]);
      all += sizes.weights;
      partials = std::max(partials, sizes.partials);
    }
    const int64_t room = shared_limit - partials - kScriptWindow * static_cast<int64_t>(sizeof(ScriptInstruction));
    if (all > room) {
      return "the weights of the " + std::string(backward ? "backward" : "forward") + " pass take " +
             std::to_string(all * part.blocks) + " bytes, " + std::to_string(part.blocks) + " blocks keep " +
             std::to_string(std::max<int64_t>(0, room) * part.blocks);
    }
  }
  return {};
}

}  // namespace weft::vertex
