"""A training loop of Accelerate on two CPU ranks, under both bounds.

    torchrun --nproc-per-node 2 examples/accelerate_loop.py

Needs the extra: pip install "tailbound[adapters]". The marked lines are ours; 2 and 3
only for the compute bound.
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tailbound
from tailbound.training.adapters.huggingface import bound


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(torch.randn(1024, 16)), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    state = tailbound.ddp_state()
    bounded = bound(accelerator, model, state, threshold_s=0.5)  # 1
    for _ in range(4):
        for (x,) in loader:
            with accelerator.accumulate(model):
                if bounded.is_over():  # 2
                    continue  # 3
                loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    report = state.last_step
    if report is not None:
        print(
            f"rank {report.rank}: loss {loss.item():.3f} after {report.step} steps, "
            f"the last under p = {report.p}; it lost {report.missing_share:.1%}"
        )
    state.close()


if __name__ == "__main__":
    main()
