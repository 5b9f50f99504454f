"""Protocol values as the engine's frames (`node.engine.api`)."""

from __future__ import annotations

from node.engine import api
from protocol.events import RecomputePart
from protocol.fields import bitmap_bytes
from protocol.messages import Commit, PartHeader, Roster, Signed
from protocol.names import Digest
from protocol.planning import contributing_of
from protocol.rules import Rules


def part_ref(header: Signed[PartHeader]) -> api.PartRef:
    message = header.message
    return api.PartRef(
        roster_id=message.roster_id,
        part=message.part,
        bitmap_bytes=bitmap_bytes(message.bitmap),
        hash=message.hash,
        length=message.length,
        root=header.sender,
        body=header.body,
        signature=header.signature,
    )


def signed_header(reference: api.PartRef) -> Signed[PartHeader]:
    """The engine verified the signature; the fields are those of the signed body."""
    return Signed(
        sender=reference.root,
        message=PartHeader(
            roster_id=reference.roster_id,
            part=reference.part,
            bitmap=reference.bitmap,
            hash=reference.hash,
            length=reference.length,
        ),
        body=reference.body,
        signature=reference.signature,
    )


def exchange_request(roster_id: Digest, roster: Roster, my_index: int, rules: Rules) -> api.Exchange:
    assert roster.plan is not None, "a roster without parts has no exchange"
    contributing = contributing_of(roster, rules)
    return api.Exchange(
        id=0,
        roster_id=roster_id,
        base=roster.base.digest(),
        my_index=my_index,
        peers=tuple(ready.sender for ready in roster.readys),
        contributing_bytes=bitmap_bytes(contributing),
        tokens=tuple(ready.message.tokens for ready in roster.readys),
        shards=tuple(api.ShardPlan(share=shard.share, parents=shard.parents) for shard in roster.plan.shards),
        durations_s=roster.durations_s,
        largest=tuple(ready.message.largest for ready in roster.readys),
        weight_cap_ratio=rules.weight_cap_ratio,
        progress_s=rules.progress_s,
        slack_s=rules.slack_s,
        parts_roots=tuple(ready.message.parts_root for ready in roster.readys),
    )


def recompute_request(effect: RecomputePart, rules: Rules, timeout_s: float) -> api.Recompute:
    roster = effect.commit.roster.message
    header = effect.commit.headers[effect.part]
    assert header is not None, "only parts that have a result are recomputed"
    assert roster.plan is not None, "a roster without parts has no results"
    return api.Recompute(
        id=0,
        base=roster.base.digest(),
        part=effect.part,
        bitmap_bytes=bitmap_bytes(header.message.bitmap),
        result_hash=header.message.hash,
        peers=tuple(ready.sender for ready in roster.readys),
        contributing_bytes=bitmap_bytes(contributing_of(roster, rules)),
        tokens=tuple(ready.message.tokens for ready in roster.readys),
        shards=tuple(api.ShardPlan(share=shard.share, parents=shard.parents) for shard in roster.plan.shards),
        parts_roots=tuple(ready.message.parts_root for ready in roster.readys),
        weight_cap_ratio=rules.weight_cap_ratio,
        sources=effect.sources,
        yields=effect.audit,
        timeout_s=timeout_s,
    )


def apply_request(commit: Commit, rules: Rules, *, my_index: int | None, contributed: bool) -> api.Apply:
    """The outer step of a commit; the learning rate follows from how many peers it counted (DESIGN section 5)."""
    counted = 0
    for header in commit.headers:
        if header is not None:
            counted |= header.message.bitmap
    base = commit.roster.message.base
    headers = tuple(part_ref(header) if header is not None else None for header in commit.headers)
    return api.Apply(
        id=0,
        base=base.digest(),
        new_round=base.round + 1,
        headers=headers or (None,) * rules.part_count,
        outer_lr=rules.outer_lr_for(max(1, counted.bit_count())),
        my_index=my_index,
        contributed=contributed,
    )
