"""Offloading in Lightning: a callback that puts every training batch into ``with weft.offload(budget)``.

python examples/offload_lightning.py
"""

from __future__ import annotations

import lightning
import torch
import weft
from torch import Tensor, nn


class Offload(lightning.Callback):
    """Arguments are those of weft.offload."""

    def __init__(self, *args, **kwargs) -> None:
        self.offload = weft.offload(*args, **kwargs)

    def on_train_batch_start(self, *_) -> None:
        self.offload.__enter__()

    def on_train_batch_end(self, *_) -> None:
        self.offload.__exit__(None, None, None)

    def on_exception(self, trainer, module, error: BaseException) -> None:
        self.offload.__exit__(type(error), error, error.__traceback__)


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(256, 256), nn.ReLU()] * 4)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> weft.offloading.OffloadReport:
    on_gpu = torch.cuda.is_available()
    callback = Offload("4MB", backend="copy" if on_gpu else "reference")
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="gpu" if on_gpu else "cpu",
        callbacks=[callback],
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
    )
    data = torch.utils.data.TensorDataset(torch.randn(4096, 256))
    trainer.fit(Net(), torch.utils.data.DataLoader(data, batch_size=1024))
    report = callback.offload.report()
    print(report)
    return report


if __name__ == "__main__":
    main()
