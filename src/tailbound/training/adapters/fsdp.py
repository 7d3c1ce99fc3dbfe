"""FSDP2: reduce across the replicas of a sharded model within the loss bound.

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    fully_shard(model, mesh=mesh["shard"])
    replicas = bound_replicas(model, mesh["replica"])

Shards are summed by FSDP as ever, inside a replica, where the network is fast; what
crosses between replicas is bounded. FSDP divides a gradient by the ranks of its shard
group, and the mean over replicas is taken here.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from tailbound.config import LossBound, Transport
from tailbound.errors import ConfigError, JobClosedError
from tailbound.protocol.events import Reduced
from tailbound.records import Record, StepReport
from tailbound.training.accumulate import Work
from tailbound.training.buckets import NAMES
from tailbound.training.leaving import note_closed, note_open
from tailbound.training.rendezvous import join_part
from tailbound.training.step_records import describe_step, label_rounds
from tailbound.transport.mesh import MeshGroup


class Replicas:
    """This rank's exchange with the ranks that hold the same shard in other replicas.

    A backward is a step. It has one round for each of FSDP's groups that has a
    gradient, and one round of a single zero that ends it: which group is the last is
    not known before the backward is over, since some may be unused.
    """

    weight: float
    """Behind this replica's next gradients, the same on all ranks of its shards."""
    loss_scale: float
    """Factor that the loss is multiplied by, for the detector."""
    last_step: StepReport | None
    """What the newest step cost and lost."""

    def __init__(
        self,
        meet: Callable[[], MeshGroup] | None,
        *,
        rank: int,
        on_record: Callable[[Record], None] | None = None,
        run: str = "",
    ) -> None:
        """See ``bound_replicas``.

        Args:
            meet: meets the other replicas, at the first use; None: there are none.
            rank: this process, for the records.
            on_record: called with every record as it is made.
            run: label written into the records.
        """
        self.weight = self.loss_scale = 1.0
        self.step = 0
        """Steps that were begun."""
        self.last_step = None
        self._meet, self._rank = meet, rank
        self._on_record, self._run = on_record, run
        self._mesh: MeshGroup | None = None
        self._is_closed = False
        self._reduced: list[Reduced] = []
        self._is_in_step = False
        self._ended_s = time.perf_counter()
        self._exchange_s = 0.0

    def reduce(self, gradient_N: Tensor) -> None:
        """Replace one group's gradient by the mean over replicas; FSDP calls this.

        Raises:
            ConfigError: its dtype does not travel.
            TailboundError: the exchange failed; it leaves ``backward`` as it is.
        """
        if self._meet is None:
            return
        if gradient_N.dtype not in NAMES:
            raise ConfigError(
                f"a gradient of {gradient_N.dtype}; those of "
                f"{', '.join(NAMES.values())} travel"
            )
        if not self._is_in_step:
            self._is_in_step = True
            self.step += 1
            self._reduced, self._exchange_s = [], 0.0
            # As FSDP itself learns that a backward is over.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_step)
        flat = gradient_N.detach()
        if self.weight != 1.0:
            flat.mul_(self.weight)
        values = flat.cpu()
        self._exchange(self._open(), values, is_last=False)
        if values is not flat:
            flat.copy_(values)

    def close(self) -> None:
        """Say goodbye to the other replicas. Closing twice is fine."""
        if self._leave() and self._mesh is not None:
            self._mesh.close()

    def abort(self, reason: str) -> None:
        """Leave because of an error; the other replicas are told the reason."""
        if self._leave() and self._mesh is not None:
            self._mesh.abort(reason)

    def _leave(self) -> bool:
        if self._is_closed:
            return False
        self._is_closed = True
        note_closed(self)
        return True

    def _open(self) -> MeshGroup:
        if self._is_closed:
            raise JobClosedError("these replicas are closed; bind the model anew")
        if self._mesh is None:
            assert self._meet is not None
            self._mesh = self._meet()
            note_open(self)
        return self._mesh

    def _exchange(self, mesh: MeshGroup, values: Tensor, *, is_last: bool) -> None:
        is_bfloat16 = values.dtype is torch.bfloat16
        begun_s = time.perf_counter()
        reduced = mesh.all_reduce(
            (values.view(torch.uint16) if is_bfloat16 else values).numpy(),
            self.weight,
            dtype=NAMES[values.dtype],
            step=self.step,
            is_last=is_last,
            loss_scale=self.loss_scale,
        )
        self._exchange_s += time.perf_counter() - begun_s
        self._reduced.append(reduced)

    def _end_step(self) -> None:
        self._is_in_step = False
        self._exchange(self._open(), torch.zeros(1), is_last=True)
        parts = self._reduced
        rounds = label_rounds(parts, run=self._run, step=self.step)
        now_s = time.perf_counter()
        self.last_step = describe_step(
            parts,
            rounds,
            Work(
                weight=self.weight,
                planned=1,
                computed=1.0,
                partial_share=0.0,
                latency_s=(),
                overshoot_s=None,
                loss=None,
            ),
            run=self._run,
            rank=self._rank,
            step=self.step,
            compute_s=now_s - self._ended_s - self._exchange_s,
            exchange_s=self._exchange_s,
            threshold_s=None,
        )
        self._ended_s = now_s
        if self._on_record is not None:
            for report in rounds:
                self._on_record(report)
            self._on_record(self.last_step)


def bound_replicas(
    model: nn.Module,
    replicas: DeviceMesh,
    *,
    network: LossBound = LossBound(),  # noqa: B008 - frozen
    transport: Transport | None = None,
    on_record: Callable[[Record], None] | None = None,
    run: str = "",
) -> Replicas:
    """Reduce a sharded model's gradients across replicas within the loss bound.

    Args:
        model: sharded by ``fully_shard`` over another axis than the replicas'.
        replicas: the axis of the device mesh along which the model is replicated.
        network: the loss bound.
        transport: how bytes travel; the sharded plan.
        on_record: called with every record as it is made.
        run: label written into the records.

    Returns:
        The exchange; it has the weight, the newest report and ``close``. Messages name
        a rank by its place among the replicas.

    Raises:
        ConfigError: the model is not sharded, or FSDP reduces across replicas itself.
    """
    transport = transport or Transport()
    if transport.plan != "sharded":
        raise ConfigError(
            'replicas reduce without a server: leave Transport(plan="sharded")'
        )
    if replicas.ndim != 1:
        raise ConfigError(
            f"replicas is one axis of a device mesh, not {replicas.ndim}: give "
            'mesh["replica"]'
        )
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ConfigError("nothing is sharded here: call fully_shard(model) before")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and any(
            isinstance(placement, Replicate) for placement in parameter.placements
        ):
            raise ConfigError(
                f"FSDP reduces {name} across replicas itself: shard over one axis, "
                'fully_shard(model, mesh=mesh["shard"])'
            )
    ranks = tuple(dist.get_process_group_ranks(replicas.get_group()))
    meet = partial(join_part, ranks, network, transport)
    exchange = Replicas(
        meet if len(ranks) > 1 else None,
        rank=dist.get_rank(),
        on_record=on_record,
        run=run,
    )
    for module in modules:
        module.set_all_reduce_hook(exchange.reduce)
    return exchange


__all__ = ["Replicas", "bound_replicas"]
