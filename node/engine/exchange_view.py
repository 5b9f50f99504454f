"""What a request says of its roster, as `protocol.exchange` sees it: the same for whoever takes part or recomputes."""

from __future__ import annotations

from node.engine import api
from node.engine.geometry import Geometry
from protocol.plan import Plan, Shard
from protocol.planning import deal
from protocol.stations import ExchangeView


def view_of(
    request: api.Exchange | api.Recompute,
    geometry: Geometry,
    *,
    my_index: int = 0,
    durations_s: tuple[float, ...] = (),
    progress_s: float = 0.0,
    slack_s: float = 0.0,
) -> ExchangeView:
    """What a request says of its roster; whoever only recomputes has no place and no deadlines in it."""
    plan = Plan(shards=tuple(Shard(share=shard.share, parents=shard.parents) for shard in request.shards))
    return ExchangeView(
        my_index=my_index,
        contributing=request.contributing,
        plan=plan,
        dealt=deal(request.base, geometry.part_count, plan),
        tokens=request.tokens,
        weight_cap_ratio=request.weight_cap_ratio,
        durations_s=durations_s,
        progress_s=progress_s,
        slack_s=slack_s,
        elements=geometry.elements,
        part_elements=geometry.part_elements,
        codec=geometry.codec.name,
        sum_codec=geometry.sum_codec.name,
    )
