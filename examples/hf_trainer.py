"""Hugging Face's Trainer on two CPU ranks, with a tiny GPT-2 of its own.

    torchrun --nproc-per-node 2 examples/hf_trainer.py

Needs the extra: pip install "tailbound[adapters]". Two lines are ours.
"""

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import tailbound
from tailbound.training.adapters.huggingface import BoundedReduction


class BoundedTrainer(BoundedReduction, Trainer):  # line 1
    """The Trainer, with gradients that travel within a loss bound."""


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count upwards; a model learns to go on."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (index + torch.arange(16)) % 32
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16}
    tokens = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 0}
    state = tailbound.ddp_state(network=tailbound.LossBound())
    with tempfile.TemporaryDirectory() as folder:
        trainer = BoundedTrainer(
            model=GPT2LMHeadModel(GPT2Config(**shape, **tokens)),
            args=TrainingArguments(
                folder,
                per_device_train_batch_size=4,
                gradient_accumulation_steps=2,
                num_train_epochs=5,
                learning_rate=1e-2,
                ddp_find_unused_parameters=False,
                use_cpu=True,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=Counting(),
            state=state,  # line 2
        )
        result = trainer.train()
    report = state.last_step
    if report is not None:
        print(
            f"rank {report.rank}: loss {result.training_loss:.2f} after {report.step} "
            f"steps, the last under p = {report.p}; it lost {report.missing_share:.1%}"
        )
    state.close()


if __name__ == "__main__":
    main()
