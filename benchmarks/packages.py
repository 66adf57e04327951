"""Recurrent models of packages from PyPI before and after weft.accelerate: outputs, gradients, 20 steps of training.

    python -m benchmarks.packages [name ...]

runs the cases whose package is installed and writes results/packages.csv, with which package, version and model; how
many layers were swapped, and which were left and why; and the relative errors (norm of the difference over the norm) of
outputs, gradients and loss curve against the same model with torch's layers, on the CPU in float32, without dropout.
None is a requirement of Weft's: pip install them beside the torch that Weft is built for.
"""

from __future__ import annotations

import copy
import csv
import importlib.metadata
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import weft
from torch import Tensor, nn

RESULTS = Path(__file__).parent / "results" / "packages.csv"
COLUMNS = ["package", "version", "torch", "model", "swapped", "left", "outputs", "gradients", "losses"]
STEPS = 20
LAYERS = (weft.nn.RNN, weft.nn.GRU, weft.nn.LSTM)

# (model, how it is called) each.
Case = tuple[str, Callable[[], nn.Module], Callable[[nn.Module], Any]]


def tensors(result: Any) -> list[Tensor]:
    """Every floating tensor in what a model returns."""
    if isinstance(result, Tensor):
        return [result] if result.is_floating_point() else []
    if isinstance(result, dict):
        result = list(result.values())
    return [t for part in result for t in tensors(part)] if isinstance(result, (list, tuple)) else []


def error(got: list[Tensor], want: list[Tensor]) -> float:
    a, b = (torch.cat([t.detach().double().flatten() for t in parts]) for parts in (got, want))
    return ((a - b).norm() / b.norm()).item()


def loss_of(outputs: list[Tensor]) -> Tensor:
    return sum((t - 1).pow(2).mean() for t in outputs if t.requires_grad)  # some are normalised: no t.pow(2)


def trained(model: nn.Module, call: Callable[[nn.Module], Any]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Outputs and gradients of the first step, and the losses of all."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    first, gradients, losses = [], [], []
    for _ in range(STEPS):
        outputs = tensors(call(model))
        loss = loss_of(outputs)
        optimizer.zero_grad()
        loss.backward()
        if not losses:
            first = [t.detach().clone() for t in outputs]
            gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        losses.append(loss.detach())
        optimizer.step()
    return first, gradients, losses


def compare(package: str, case: Case) -> dict[str, Any]:
    what, build, call = case
    torch.manual_seed(0)
    theirs = build().train()
    for module in theirs.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        elif isinstance(module, nn.RNNBase):
            module.dropout = 0.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = weft.accelerate(copy.deepcopy(theirs), subclasses=True)
    left = [str(w.message).split(": ", 1)[1] for w in caught if str(w.message).startswith("weft.accelerate left")]
    a, b = (trained(model, call) for model in (ours, theirs))
    return {
        "package": package,
        "version": importlib.metadata.version(package),
        "torch": torch.__version__,
        "model": what,
        "swapped": sum(issubclass(type(m), LAYERS) for m in ours.modules()),
        "left": "; ".join(left),
        **{name: f"{error(x, y):.1e}" for name, x, y in zip(COLUMNS[-3:], a, b, strict=True)},
    }


def openunmix() -> list[Case]:
    from openunmix.model import OpenUnmix

    x = torch.rand(2, 2, 129, 50)
    return [("OpenUnmix", lambda: OpenUnmix(nb_bins=129, nb_channels=2, hidden_size=64), lambda m: m(x))]


def easyocr() -> list[Case]:
    from easyocr.model.vgg_model import Model

    x = torch.randn(2, 1, 64, 160)
    return [("vgg_model.Model", lambda: Model(1, 64, 64, 40), lambda m: m(x, None))]


def gluonts() -> list[Case]:
    from gluonts.torch.model.deepar.module import DeepARModel

    def build():
        return DeepARModel(
            freq="h", context_length=24, prediction_length=12, num_feat_dynamic_real=1, num_feat_static_real=1,
            num_feat_static_cat=1, cardinality=[3],
        )  # fmt: skip

    past = build()._past_length
    inputs = {
        "feat_static_cat": torch.zeros(4, 1, dtype=torch.long), "feat_static_real": torch.randn(4, 1),
        "past_time_feat": torch.randn(4, past, 1), "past_target": torch.randn(4, past),
        "past_observed_values": torch.ones(4, past), "future_time_feat": torch.randn(4, 12, 1),
        "future_target": torch.randn(4, 12), "future_observed_values": torch.ones(4, 12),
    }  # fmt: skip
    return [("DeepARModel", build, lambda m: m.loss(**inputs))]


def flair() -> list[Case]:
    from flair.data import Dictionary
    from flair.models import LanguageModel

    dictionary = Dictionary()
    for letter in "abcdefghij":
        dictionary.add_item(letter)
    x = torch.randint(0, 10, (40, 4))
    build = lambda: LanguageModel(dictionary, True, hidden_size=64, nlayers=2)  # noqa: E731
    return [("LanguageModel", build, lambda m: m(x, m.init_hidden(4))[0])]


def pytorch_forecasting() -> list[Case]:
    from pytorch_forecasting.models.nn.rnn import LSTM

    x, lengths = torch.randn(4, 20, 8), torch.full((4,), 20)
    build = lambda: nn.Sequential(LSTM(8, 16, batch_first=True))  # noqa: E731
    return [("models.nn.rnn.LSTM", build, lambda m: m[0](x, lengths=lengths)[0])]


def neuralforecast() -> list[Case]:
    from neuralforecast.models import GRU, LSTM

    batch = {"insample_y": torch.randn(4, 24, 1), "futr_exog": None, "hist_exog": None, "stat_exog": None}
    return [
        (
            kind.__name__,
            lambda kind=kind: kind(h=6, input_size=24, encoder_hidden_size=32, encoder_dropout=0.0),
            lambda m: m(batch),
        )
        for kind in (LSTM, GRU)
    ]


def speechbrain() -> list[Case]:
    from speechbrain.nnet.RNN import GRU, LSTM

    x, lengths = torch.randn(4, 30, 20), torch.tensor([1.0, 0.8, 0.6, 0.5])
    return [
        (
            f"nnet.RNN.{kind.__name__}",
            lambda kind=kind: kind(hidden_size=32, input_shape=[4, 30, 20], num_layers=2, bidirectional=True),
            lambda m: m(x, lengths=lengths)[0],
        )
        for kind in (LSTM, GRU)
    ]


def asteroid() -> list[Case]:
    from asteroid.models import DPRNNTasNet

    x = torch.randn(1, 2000)
    options = {"n_repeats": 2, "hid_size": 32, "bn_chan": 32, "chunk_size": 50, "n_filters": 32}
    return [("DPRNNTasNet", lambda: DPRNNTasNet(2, **options), lambda m: m(x))]


def espnet() -> list[Case]:
    from espnet2.lm.seq_rnn_lm import SequentialRNNLM

    x, prefixes = torch.randint(1, 30, (4, 25)), torch.randint(1, 30, (3, 4))

    def decoded(model):
        """Two steps of a beam search, which takes the layers' state apart by what they are."""
        scores, states = model.batch_score(prefixes, [None] * 3, torch.zeros(3, 4, 32))
        return scores, model.batch_score(prefixes, states, torch.zeros(3, 4, 32))[0]

    def build(kind):
        return lambda: SequentialRNNLM(30, unit=32, nlayers=2, dropout_rate=0.0, rnn_type=kind)

    kinds = ["lstm", "gru", "rnn_tanh"]
    return [
        *((f"SequentialRNNLM, {kind}", build(kind), lambda m: m(x, None)[0]) for kind in kinds),
        *((f"SequentialRNNLM, {kind}, beam search", build(kind), decoded) for kind in kinds),
    ]


def torchrl() -> list[Case]:
    from tensordict import TensorDict
    from torchrl.modules import GRUModule, LSTMModule, set_recurrent_mode

    observations, starts = torch.randn(4, 20, 3), torch.zeros(4, 20, 1, dtype=torch.bool)
    starts[:, 0] = starts[1, 7] = starts[2, 13] = True

    def case(kind, names):
        keys = {
            "in_keys": ["observation", *names],
            "out_keys": ["intermediate", *(("next", name) for name in names)],
        }

        def call(model):
            states = {name: torch.zeros(4, 20, 1, 16) for name in names}
            data = TensorDict({"observation": observations, "is_init": starts, **states}, [4, 20])
            with set_recurrent_mode(True):
                return model(data)["intermediate"]

        what = f"{kind.__name__}, episodes that start inside"
        return what, lambda: kind(input_size=3, hidden_size=16, **keys), call

    return [case(LSTMModule, ["recurrent_state_h", "recurrent_state_c"]), case(GRUModule, ["recurrent_state"])]


def sb3_contrib() -> list[Case]:
    from sb3_contrib import RecurrentPPO
    from sb3_contrib.common.recurrent.type_aliases import RNNStates

    policy = RecurrentPPO("MlpLstmPolicy", "CartPole-v1", seed=0, device="cpu").policy
    observations, starts = torch.randn(40, 4), torch.zeros(40)
    starts[::10] = 1.0

    def call(model):
        zeros = (torch.zeros(1, 4, 256), torch.zeros(1, 4, 256))
        return model.evaluate_actions(observations, torch.zeros(40), RNNStates(zeros, zeros), starts)

    return [("RecurrentPPO's policy", lambda: policy, call)]


def u8darts() -> list[Case]:
    from darts.models.forecasting.block_rnn_model import _BlockRNNModule

    x = torch.randn(4, 24, 1)

    def build():
        return _BlockRNNModule(
            name="LSTM", input_size=1, hidden_dim=25, future_cov_dim=0, num_layers=2, target_size=1, nr_params=1,
            num_layers_out_fc=[], dropout=0.0, input_chunk_length=24, output_chunk_length=6, output_chunk_shift=0,
            train_sample_shape=None, loss_fn=nn.MSELoss(), torch_metrics=None, likelihood=None,
            optimizer_cls=torch.optim.Adam,
        )  # fmt: skip

    return [("BlockRNNModel", build, lambda m: m((x, None, None)))]


def demucs() -> list[Case]:
    from demucs.demucs import Demucs

    x = torch.randn(1, 2, 4000)
    build = lambda: Demucs(["a", "b"], channels=8, depth=3, lstm_layers=2, resample=False)  # noqa: E731
    return [("Demucs", build, lambda m: m(x))]


def resemblyzer() -> list[Case]:
    from resemblyzer import VoiceEncoder

    x = torch.randn(4, 160, 40)
    return [("VoiceEncoder", lambda: VoiceEncoder("cpu", verbose=False), lambda m: m(x))]


def pyannote_audio() -> list[Case]:
    from pyannote.audio.models.segmentation import PyanNet

    x = torch.randn(1, 1, 32000)
    # What comes after the layers is made where a task is set.
    return [("PyanNet", lambda: PyanNet(sample_rate=16000), lambda m: m.lstm(m.sincnet(x).transpose(1, 2))[0])]


CASES = {
    "openunmix": openunmix,
    "easyocr": easyocr,
    "gluonts": gluonts,
    "flair": flair,
    "pytorch-forecasting": pytorch_forecasting,
    "neuralforecast": neuralforecast,
    "speechbrain": speechbrain,
    "asteroid": asteroid,
    "espnet": espnet,
    "torchrl": torchrl,
    "sb3-contrib": sb3_contrib,
    "u8darts": u8darts,
    "demucs": demucs,
    "resemblyzer": resemblyzer,
    "pyannote.audio": pyannote_audio,
}


def installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    rows = []
    for package in names or [name for name in CASES if installed(name)]:
        for case in CASES[package]():
            rows.append(compare(package, case))
            print(",".join(str(rows[-1][column]) for column in COLUMNS), flush=True)
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
