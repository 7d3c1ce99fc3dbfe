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
from tailbound.errors import ConfigError
from tailbound.protocol.events import Reduced
from tailbound.records import Record
from tailbound.training.buckets import NAMES
from tailbound.training.mesh_steps import (
    MeshSteps,
    check_gradient,
    check_settings,
    multiply,
    wire_values,
)
from tailbound.training.rendezvous import join_part
from tailbound.transport.mesh import MeshGroup


class Replicas(MeshSteps):
    """This rank's exchange with the ranks that hold the same shard in other replicas.

    A backward is a step. It has one round for each of FSDP's groups that has a
    gradient, and one round of a single zero that ends it: which group is the last is
    not known before the backward is over, since some may be unused. ``weight`` must be
    the same on all ranks of a replica.
    """

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
        super().__init__(on_record, run)
        self._make_mesh, self._rank = meet, rank
        self._reduced: list[Reduced] = []
        self._is_in_step = False
        self._exchange_s = 0.0

    def _join(self) -> MeshGroup:
        assert self._make_mesh is not None
        return self._make_mesh()

    def reduce(self, gradient_N: Tensor) -> None:
        """Replace one group's gradient by the mean over replicas; FSDP calls this.

        Raises:
            ConfigError: it cannot travel; or it is float16 and ``weight`` is over 1.
            TailboundError: the exchange failed; it leaves ``backward`` as it is.
        """
        if self._make_mesh is None:
            return
        flat = gradient_N.detach()
        check_gradient(flat, self.weight)
        if not self._is_in_step:
            self._is_in_step = True
            self.step += 1
            self._reduced, self._exchange_s = [], 0.0
            # As FSDP itself learns that a backward is over.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_step)
        multiply(flat, self.weight)
        values = flat.cpu()
        self._exchange(values, is_last=False)
        if values is not flat:
            flat.copy_(values)

    def _exchange(self, values: Tensor, *, is_last: bool) -> None:
        mesh = self._meet()
        begun_s = time.perf_counter()
        reduced = mesh.all_reduce(
            wire_values(values),
            self.weight,
            dtype=NAMES[values.dtype],
            step=self.step,
            is_last=is_last,
            loss_scale=self.loss_scale,
            computed=self.computed,
            planned=self.planned,
        )
        self._exchange_s += time.perf_counter() - begun_s
        self._reduced.append(reduced)

    def _end_step(self) -> None:
        self._is_in_step = False
        self._exchange(torch.zeros(1), is_last=True)
        self._tell(self._reduced, rank=self._rank, exchange_s=self._exchange_s)


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
        ConfigError: no loss bound, the server plan, the model is not sharded, or FSDP
            reduces across replicas itself.
    """
    transport = check_settings(network, transport)
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
