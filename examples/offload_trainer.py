"""Offloading in Hugging Face's Trainer: `compute_loss`, which runs the forward, decorated with an offload object.

python examples/offload_trainer.py
"""

from __future__ import annotations

import tempfile

import torch
import weft
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


def main() -> weft.offloading.OffloadReport:
    offload = weft.offload("4MB", backend="copy" if torch.cuda.is_available() else "reference", min_bytes="16KiB")
    model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=64, n_embd=64, n_layer=4, n_head=4))
    tokens = torch.randint(100, (64, 64))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            max_steps=4,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=data)
        trainer.compute_loss = offload(trainer.compute_loss)
        trainer.train()
    report = offload.report()
    print(report)
    return report


if __name__ == "__main__":
    main()
