"""What a round of a mesh leaves in the records: its two ways, over all links."""

from collections.abc import Sequence
from typing import Any

from tailbound.protocol.chunks import ChunkLayout, beyond_bound
from tailbound.protocol.mesh_round import MeshRound
from tailbound.records import RoundReport


def describe_round(round_: MeshRound) -> tuple[RoundReport, ...]:
    """The way in and the way back of one rank; ``step`` is set by the caller.

    A rank's links run at the same time, so times, sends and probes are those of the
    slowest link; chunks and datagrams are of all of them.
    """
    reports = []
    sent = [sender.statistics() for sender in round_.ways_in.values()]
    if sent:
        p = round_.p or 0.0
        reports.append(
            RoundReport(
                **_common(round_, [s.layout for s in round_.ways_in.values()]),
                direction="in",
                p=p,
                missing=sum(one.missing for one in sent),
                sends=max(one.sends for one in sent),
                probes=max(one.probes for one in sent),
                sent=sum(one.sent for one in sent),
                retransmitted=sum(one.retransmitted for one in sent),
                latency_s=max(one.latency_s for one in sent),
                waiting_s=max(one.waiting_s for one in sent),
                early_stop=any(one.early_stop for one in sent),
                given_up=sum(
                    beyond_bound(
                        sender.statistics().missing, p, sender.layout.num_chunks
                    )
                    for sender in round_.ways_in.values()
                ),
            )
        )
    got = [back.statistics() for back in round_.backs.values()]
    if got and round_.total_weight:
        closed_s = round_.started_s + max(one.latency_s for one in got)
        reports.append(
            RoundReport(
                **_common(round_, [back.layout for back in round_.backs.values()]),
                direction="back",
                p=round_.plan.bound.p_back,
                missing=sum(one.missing for one in got),
                sends=1 + max(one.probes for one in got),
                probes=max(one.probes for one in got),
                sent=sum(one.received for one in got),
                retransmitted=sum(one.duplicates for one in got),
                latency_s=max(0.0, closed_s - round_.back_s),
                waiting_s=0.0,
                early_stop=False,
            )
        )
    return tuple(reports)


def _common(round_: MeshRound, layouts: Sequence[ChunkLayout]) -> dict[str, Any]:
    itemsize = round_.format.wire.itemsize
    return {
        "rank": round_.plan.rank,
        "step": 0,
        "counter": round_.key.counter,
        "bucket": round_.key.bucket,
        "critical": round_.critical,
        "num_chunks": sum(layout.num_chunks for layout in layouts),
        "num_bytes": itemsize * sum(layout.num_elements for layout in layouts),
    }
