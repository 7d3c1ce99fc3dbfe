"""Lightning on two CPU ranks; a callback bounds the gradients' loss and the compute.

    torchrun --nproc-per-node 2 examples/lightning_callback.py

Needs the extra: pip install "tailbound[adapters]". One line is ours.
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import tailbound
from tailbound.training.adapters.lightning import BoundedAllreduce


class Regression(LightningModule):
    """Learns the sum of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (x,) = batch
        return nn.functional.mse_loss(self.net(x), x.sum(1, keepdim=True))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.randn(1024, 16)), batch_size=16)
    bounded = BoundedAllreduce(tailbound.ddp_state(), threshold_s=0.5)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=4,
        accumulate_grad_batches=4,
        callbacks=[bounded],  # the one line
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), loader)
    report = bounded.state.last_step
    if report is not None:
        print(
            f"rank {trainer.global_rank}: {report.step} steps, the last under "
            f"p = {report.p}; it lost {report.missing_share:.1%}"
        )
    bounded.state.close()


if __name__ == "__main__":
    main()
