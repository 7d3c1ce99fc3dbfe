"""docs/asked-for.md: its blocks run, on one rank, and the tests that it names exist."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import tailbound
from training.ranks import build_mlp, plain_sgd

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "asked-for.md").read_text(encoding="utf-8")
SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
BLOCKS = [
    (section.partition(".")[0], block)
    for section in SECTIONS
    for block in re.findall(
        r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL
    )
]


@pytest.fixture
def names(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """What the page's blocks take as given."""
    store = HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    model = build_mlp(1)
    optimizer = plain_sgd(model, 0.1)
    data = TensorDataset(torch.ones(16, 3), torch.ones(16, 1))
    sampler = tailbound.ResamplingSampler(16, num_replicas=1, rank=0)
    job = tailbound.attach(
        model, optimizer, micro_batches=4, compute=tailbound.ComputeBound()
    )
    given = {
        "tailbound": tailbound,
        "torch": torch,
        "model": model,
        "optimizer": optimizer,
        "ddp": DistributedDataParallel(build_mlp(1)),
        "loss_fn": nn.functional.mse_loss,
        "loader": DataLoader(data, 4),
        "sampler": sampler,
        "batch": data[:8],
        "path": tmp_path / "state.pt",
        "job": job,
    }
    try:
        yield given
    finally:
        job.close()
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("section", "block"), BLOCKS, ids=[f"section {number}" for number, _ in BLOCKS]
)
def test_a_block_of_the_page_runs(
    section: str, block: str, names: dict[str, Any]
) -> None:
    exec(compile(block, f"asked-for.md, section {section}", "exec"), names)


def test_there_is_a_section_for_each_ask_with_a_proof_and_a_limit() -> None:
    assert [section.partition(".")[0] for section in SECTIONS] == [
        str(number) for number in range(1, 13)
    ]
    for section in SECTIONS:
        assert "*Proof:*" in section
        assert "*Not:*" in section


def test_every_test_that_the_page_names_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE)

    assert len(named) > 24
    for path, test in named:
        source = (ROOT / path).read_text(encoding="utf-8")
        assert not test or f"def {test}(" in source, (path, test)
