"""Attach a job to a model: find the other ranks, agree, make replicas equal."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from tailbound.compute.budget import Budget
from tailbound.config import ComputeBound, LossBound, Transport
from tailbound.errors import ConfigError
from tailbound.protocol.messages import BucketSpec
from tailbound.training.accumulate import Accumulation
from tailbound.training.buckets import equalise, make_buckets
from tailbound.training.clocks import ComputeClock, make_clock
from tailbound.training.ddp import HeldDdp, unwrap
from tailbound.training.exchange import (
    Exchange,
    GroupExchange,
    LocalExchange,
    MeshExchange,
    ProcessGroupExchange,
)
from tailbound.training.job import Job, OnRecord
from tailbound.training.leaving import describe
from tailbound.training.rendezvous import (
    find_place,
    find_server,
    join_mesh,
    read_secret,
)
from tailbound.transport.group import Group

MakeExchange = Callable[[tuple[BucketSpec, ...]], Exchange]


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    micro_batches: int = 1,
    compute: ComputeBound | None = None,
    network: LossBound | None = LossBound(),  # noqa: B008 - frozen
    transport: Transport | None = None,
    on_record: OnRecord | None = None,
    run: str = "",
) -> Job:
    """Attach a job to a model and its optimizer.

    Meets the other ranks (``torchrun`` started them, or a process group exists), makes
    parameters and buffers equal to rank 0's, and returns the job object.

    Args:
        model: the same on every rank; plain, or wrapped in DDP, whose own reduction
            rests until the job is closed.
        optimizer: of the model's parameters.
        micro_batches: how many each step's batch is split into (M).
        compute: the compute bound; None lets every rank finish all micro-batches.
        network: the loss bound; None averages exactly over the process group, whose
            own timeout holds then.
        transport: how bytes travel; only with a loss bound.
        on_record: called with every record as it is made.
        run: label written into the records.

    Returns:
        The job; close it, or use it as a context manager. One that is still open when
        the script ends is closed then.

    Raises:
        ConfigError: a setting, the model or the environment is unusable.
        TailboundError: the ranks could not meet or do not agree; see ``errors``.
    """
    if network is not None and network.residual_momentum > 0.0:
        _check_no_momentum(optimizer)

    def make_exchange(specs: tuple[BucketSpec, ...]) -> Exchange:
        return find_exchange(specs, network, transport or Transport())

    return attach_through(
        make_exchange,
        model,
        optimizer,
        micro_batches=micro_batches,
        compute=compute,
        on_record=on_record,
        run=run,
    )


def attach_through(
    make_exchange: MakeExchange,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    micro_batches: int = 1,
    compute: ComputeBound | None = None,
    clock: ComputeClock | None = None,
    on_record: OnRecord | None = None,
    run: str = "",
) -> Job:
    """Do what ``attach`` does, over an exchange that the caller brings.

    Args:
        make_exchange: given the buckets, meets the other ranks.
        model: see ``attach``.
        optimizer: see ``attach``.
        micro_batches: see ``attach``.
        compute: see ``attach``.
        clock: measures the compute; None: the one for the model's device.
        on_record: see ``attach``.
        run: see ``attach``.

    Raises:
        ConfigError: see ``attach``.
        TailboundError: see ``attach``.
    """
    if not isinstance(micro_batches, int) or micro_batches < 1:
        raise ConfigError(f"micro_batches is 1 or more, not {micro_batches}")
    if compute is not None and not isinstance(compute, ComputeBound):
        raise ConfigError(f"compute is a tailbound.ComputeBound or None, not {compute}")
    if compute is not None and micro_batches == 1 and compute.preempt == "micro_batch":
        raise ConfigError(
            "a compute bound stops between micro-batches: set micro_batches to 2 or "
            'more (DropCompute uses 12), or preempt="backward"'
        )
    inner, ddp = unwrap(model)
    _check_optimizer(inner, optimizer)
    buckets = make_buckets(inner)
    held = None if ddp is None else HeldDdp(ddp)
    try:
        exchange = make_exchange(tuple(bucket.spec for bucket in buckets))
        try:
            if exchange.world_size > 1:
                equalise(inner, exchange.all_gather, exchange.rank)
        except BaseException as error:
            exchange.abort(describe(error))
            raise
    except BaseException:
        if held is not None:
            held.release()
        raise
    budget = None
    if compute is not None:
        budget = Budget(
            compute,
            num_micro_batches=micro_batches,
            rank=exchange.rank,
            world_size=exchange.world_size,
        )
    parameters = [p for bucket in buckets for p in bucket.parameters]
    accumulation = Accumulation(
        parameters, clock or make_clock(parameters[0].device), budget
    )
    return Job(
        inner,
        optimizer,
        exchange,
        buckets,
        accumulation,
        micro_batches=micro_batches,
        budget=budget,
        held=held,
        on_record=on_record,
        run=run,
    )


def _check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    ours = {id(parameter) for parameter in model.parameters()}
    steps = (p for group in optimizer.param_groups for p in group["params"])
    if any(id(parameter) not in ours for parameter in steps):
        raise ConfigError(
            "the optimizer steps parameters that are not the model's: nobody would "
            "average their gradients; attach the module that holds them all"
        )


def _check_no_momentum(optimizer: torch.optim.Optimizer) -> None:
    """With ``residual_momentum`` the senders have the momentum.

    Raises:
        ConfigError: the optimizer has one of its own (SGD's and RMSprop's
            ``momentum``, the first of Adam's ``betas``).
    """
    for group in optimizer.param_groups:
        own = group.get("momentum", 0.0) or group.get("betas", (0.0,))[0]
        if own:
            raise ConfigError(
                f"residual_momentum and the optimizer's momentum of {own} would both "
                "act: give the optimizer none (momentum=0, or a first beta of 0)"
            )


def _check_server_bound(bound: LossBound) -> None:
    """Refuse what the server plan does not do.

    Raises:
        ConfigError: the way back may lose.
    """
    if bound.p_back:
        raise ConfigError(
            f'p_back={bound.p_back} needs Transport(plan="sharded"): the server\'s '
            "way back is exact"
        )


def find_exchange(
    specs: tuple[BucketSpec, ...], network: LossBound | None, transport: Transport
) -> Exchange:
    """Meet the other ranks over what the settings say.

    Args:
        specs: the buckets; empty where only bytes are exchanged.
        network: the loss bound; None: the process group.
        transport: how bytes travel with a loss bound.

    Raises:
        ConfigError: no process group where one is needed, or too short a secret.
        TailboundError: the ranks could not meet or do not agree.
    """
    place = find_place(has_server=transport.server is not None)
    if place.world_size == 1:
        if network is not None and network.residual_momentum > 0.0:
            raise ConfigError(
                "residual_momentum acts where gradients are sent, and a job of one "
                "sends none: leave it out, and give the optimizer its momentum"
            )
        return LocalExchange()
    if network is None:
        if not dist.is_initialized():
            raise ConfigError(
                "network=None averages over the process group: call "
                "torch.distributed.init_process_group first"
            )
        return ProcessGroupExchange()
    if transport.plan == "sharded":
        mesh = join_mesh(place, network, transport)
        return MeshExchange(mesh, specs, network)
    _check_server_bound(network)
    transport = read_secret(transport)
    address, server = find_server(place, transport)
    group = Group(
        address,
        rank=place.rank,
        world_size=place.world_size,
        buckets=specs,
        bound=network,
        transport=transport,
        server=server,
    )
    return GroupExchange(group)
