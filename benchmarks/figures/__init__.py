"""Figures and tables of the docs and the README: a module per room, each drawn from rows of benchmarks/results alone.

A room's module has ``page(results, folder)``: it draws the room's figures into `folder` and returns the parts of its
page as reStructuredText, none where there are no rows. `results` maps the name of a CSV file to its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from benchmarks.common import CASE_KEYS, parse_case, significant

NAMES = {"rnn_tanh": "tanh RNN", "rnn_relu": "ReLU RNN", "gru": "GRU", "lstm": "LSTM", "linear_scan": "linear_scan"}
NAMES |= {"rnn": "tanh RNN", "all_gather": "all-gather"}
NAMES |= {"pointwise_scan": "pointwise_scan", "paragru": "ParaGRU", "paralstm": "ParaLSTM", "spiking": "spiking"}
NAMES |= {"mingru": "minGRU", "char_lm": "character model"}
NAMES |= {"jacobian": "Jacobian", "vgg11": "VGG-11", "vgg11_pruned": "pruned VGG-11", "lenet5": "LeNet-5"}
NAMES |= {"treelstm": "Tree-LSTM", "childsum": "child-sum Tree-LSTM", "treefc": "Tree-FC", "chainlstm": "LSTM chain"}
NAMES |= {"rvnn": "RvNN", "td-rnn": "TD-RNN", "td-lstm": "TD-LSTM", "own": "a cell of one's own"}
NAMES |= {"bilstm": "LSTM tagger", "bilstm-char": "LSTM tagger with characters", "nets": "the six nets"}
NAMES |= {"vgg19": "VGG-19", "resnet152": "ResNet-152", "efficientnet": "EfficientNet-B0"}
NAMES |= {"gpt": "GPT", "llama": "Llama-shaped decoder"}
NAMES |= {"alexnet": "AlexNet", "squeezenet": "SqueezeNet", "googlenet": "GoogLeNet"}
NAMES |= {"mingru_stack": "stack of minGRUs", "long_context": "examples/long_context.py", "fsdp2": "stack with FSDP2"}
NAMES |= {f"blocks{n}": f"{n} blocks" for n in (8, 16, 32, 64, 128, 256)}
METRICS = {
    "forward": "forward",
    "backward": "backward",
    "forward_backward": "forward + backward",
    "forward_backward_captured": "forward + backward, captured",
    "host_forward": "the host's time of a forward call",
    "host_backward": "the host's time of a backward call",
    "peak_memory": "peak memory of a step",
    "memory_beyond_torch": "memory beyond torch's",
    "error": "error against fp64",
    "inference": "forward without gradients",
    "decode": "one step per call",
    "step_forward": "a step of the forward pass",
    "step": "training step",
    "first_uses": "the longest of the first ten training steps",
    "moved": "saved bytes that moved",
    "sent": "bytes sent over the bus",
    "saved_peak": "peak of the saved bytes",
    "predicted_step": "step as the policy predicts it",
    "host": "time of the host per saved tensor",
    "gemm": "matrix products beside the codec",
    "transfer": "a gigabyte over the bus, beside matrix products",
    "compressed": "compressed size",
    "read": "back on the device and read",
    "device_time": "time of the device",
    "generate": "a Jacobian",
    "elements": "stored elements",
    "plan_memory": "memory of the plan",
    "input_gradients": "all input gradients",
    "input_gradients_captured": "all input gradients, captured",
    "backward_captured": "backward, captured",
    "input_flops": "all input gradients",
    "flops": "all steps",
    "critical_flops": "the critical path",
    "level_flops": "a level",
    "level_elements": "Jacobians of a level",
    "level_forward": "one more level, forward",
    "level_backward": "one more level, backward",
    "host_of_cell": "the host's part: call and backward of the cell",
    "schedule": "scheduling of a new batch",
    "exchange": "an exchange between ranks",
    "forward_exchange": "the exchange in forward",
    "backward_exchange": "the exchanges in backward",
    "forward_backward_exchange": "the exchanges in forward + backward",
    "step_exchange": "the exchanges in a training step",
    "forward_of_many": "forward, predicted",
    "backward_queued": "backward, of the device alone",
    "forward_queued": "forward, of the device alone",
    "forward_backward_queued": "forward + backward, of the device alone",
    "forward_backward_waits": "what forward + backward wait for exchanges",
    "sent_to_ranks": "what a rank sends in forward",
    "forward_of_all_over_one": "time of all ranks over that of one, forward",
    "forward_backward_of_all_over_one": "time of all ranks over that of one, forward + backward",
    "gigabyte_d2h": "a gigabyte to the host",
    "gigabyte_h2d": "a gigabyte from the host",
    "steps_in_a_row": "a step of many, each on a new batch",
    "throughput": "throughput",
    "memory": "steps that it remembers for",
    "first_call": "the first call of a new step",
    "bits_per_character": "bits per character of held-out text",
}
PEERS = {
    "gru": "GRU",
    "walk": "one walk",
    "loop": "a loop over time",
    "pararnn": "pararnn-torch",
    "sequence": "the sequence",
    "from_disk": "machine code on disk",
    "gate_activations": "bytes of the gates' activations",
    "floor": "floor of the bandwidth",
    "exchange_floor": "floor of the exchange",
    "plain": "without offload",
    "saved": "all that is saved",
    "hideable": "what the bus takes meanwhile",
    "everything_and_budget": "everything moved, and the budget",
    "no_policy": "without a policy",
    "python_hooks": "empty hooks in Python",
    "alone": "alone",
    "one_rank": "one rank",
    "slice": "its slice alone",
    "work_alone": "the work alone",
    "one_after_the_other": "one direction after the other",
    "all_to_all": "all-to-all between time and channels",
    "flash-linear-attention": "flash-linear-attention's gated delta rule",
    "predicted": "predicted",
    "checkpoint": "checkpointing",
    "torchtune": "torchtune's OffloadActivations",
    "batched": '"batched"',
    "persistent": '"persistent"',
    "reference": '"reference"',
    "best": "the faster executor",
    "device_busy": "the device's part of it",
    "without_cell": "the rest of it alone",
    "untyped": "as one function",
    "eager": "eager PyTorch",
    "captured": "PyTorch in a CUDA graph",
    "cusparse_spgemm": "cuSPARSE SpGEMM",
    "cusparse_spgemm_reuse": "cuSPARSE SpGEMMreuse",
    "operands_and_product": "operands and product",
    "baseline": "layers' own gradient operators",
    "critical": "its largest step",
    "largest": "its largest",
}
DTYPE_COLORS = {"fp16": "#2563eb", "bf16": "#c2410c", "fp32": "#15803d"}
WEFT_COLOR, PEER_COLOR = "#c2410c", "#888888"

# The same rows give the same file, so that a figure changes only with what it shows.
plt.rcParams.update({"svg.hashsalt": "weft", "svg.fonttype": "none", "figure.dpi": 100, "font.size": 10})

Row = Mapping[str, str]
Rows = Sequence[Row]
Results = Mapping[str, Rows]


def describe(case: str) -> str:
    """A case in words: ``tanh RNN, H 20, B 16, T 1000, fp32, 1 input``."""
    keys = parse_case(case)
    words = [NAMES.get(name, name) for name in (keys.get("cell"), keys.get("op"), keys.get("model")) if name]
    words += [keys["layout"]] if "layout" in keys else []
    words += [f"{key} {keys[key]}" for key in ("H", "B", "T") if key in keys]
    words += [keys["dtype"]] if "dtype" in keys else []
    words += [f"{keys['layers']} layers"] if "layers" in keys else []
    words += ["both directions"] if keys.get("directions") == "2" else []
    if "inputs" in keys:
        words.append("1 input" if keys["inputs"] == "1" else f"{keys['inputs']} inputs")
    words += [f"{keys['threads']} threads"] if "threads" in keys else []
    words += [f'algorithm "{keys["algorithm"]}"'] if "algorithm" in keys else []
    # The executor that "auto" takes goes without saying.
    words += [f"{key} {v}" for key, v in keys.items() if key not in _DESCRIBED and (key, v) != ("executor", "batched")]
    return ", ".join(words)


_DESCRIBED = {*CASE_KEYS, "inputs", "threads", "algorithm"}


def quantity(value: str, unit: str) -> str:
    """A value with its unit, bytes in MB."""
    if unit == "bytes":
        return f"{significant(float(value) / 1e6, 3)} MB"
    return value if unit == "relative" else f"{value} {unit}"


def cells_of(row: Row) -> list[str]:
    """One line of a table."""
    peer = PEERS.get(row["peer"], row["peer"])
    measured = [quantity(row["weft"], row["unit"]), f"{peer}: {quantity(row['peer_value'], row['unit'])}"]
    return [describe(row["case"]), METRICS.get(row["metric"], row["metric"]), *measured, ratio_of(row)]


def ratio_of(row: Row) -> str:
    return f"{significant(float(row['ratio']), 3)}x" if row["ratio"] else ""


HEADER = ["case", "what", "Weft", "peer", "ratio"]


def by_hardware(rows: Rows) -> dict[str, list[Row]]:
    """Rows under the name of what they were measured on, GPUs first."""
    groups: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: parse_case(row["case"])["device"] != "cuda"):
        on_gpu = parse_case(row["case"])["device"] == "cuda"
        software = f"torch {row['torch']}" + (f", CUDA {row['cuda']}" if on_gpu else "")
        groups.setdefault(f"{row['gpu']}, {software}", []).append(row)
    return groups


def rst_tables(rows: Rows) -> str:
    return "\n\n".join(rst_table(name, [HEADER, *map(cells_of, group)]) for name, group in by_hardware(rows).items())


def rst_table(title: str, lines: Iterable[Sequence[str]]) -> str:
    """A table whose first line is its header: a line of text for each of its own, which code hosts show, too."""
    header, *rest = (", ".join('"' + cell.replace('"', '""') + '"' for cell in line) for line in lines)
    return "\n".join([f".. csv-table:: {title}", f"   :header: {header}", "", *(f"   {line}" for line in rest)])


def save(figure: plt.Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)


def image(path: Path) -> str:
    """The figure, on a page in a folder beside the figures'."""
    return f".. image:: ../{path.parent.name}/{path.name}"
