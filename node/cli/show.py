"""Status for people: tables on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from node.memory import human
from node.status import HistoryRound, MemberStatus, Peers, Status

SHOWN_ROUNDS = 8
_PHASE_STYLE = {
    "training": "green",
    "exchanging": "cyan",
    "committing": "cyan",
    "finished": "bold green",
    "leaving": "yellow",
}


def print_status(status: Status) -> None:
    console = Console()
    console.print(status_view(status, addresses=False))
    for address in status.addresses:  # in one piece, to be copied
        console.print(f"join by  {address}", soft_wrap=True, highlight=False)


def print_peers(peers: Peers) -> None:
    Console().print(members_table(peers.peers, peers.peer_id))


def line(status: Status) -> str:
    """The whole status in one line, for logs and pipes."""
    rounds = f"round {status.round}" + (f"/{status.final_round}" if status.final_round else "")
    words = [rounds, status.phase, f"{status.members} members", f"loss {number(status.loss)}"]
    if status.validation_loss is not None:
        words.append(f"validation {number(status.validation_loss)}")
    words += [f"{quantity(status.tokens_per_s)} tokens/s", status.reason]
    return " | ".join(words)


def status_view(status: Status, *, addresses: bool = True) -> RenderableType:
    """What fits on one screen; `reason` stands first, since it is what people look for."""
    parts: list[RenderableType] = [
        Text.assemble((status.phase, _PHASE_STYLE.get(status.phase, "yellow")), "  ", status.reason),
        _facts(status, status.addresses if addresses else ()),
    ]
    if status.history:
        parts.append(history_table(status.history[-SHOWN_ROUNDS:], status))
    if status.caught:
        caught = "; ".join(f"{short(peer)}: {offence}" for peer, offence in sorted(status.caught.items()))
        parts.append(Text(f"left out for good: {caught}", style="bold red"))
    for role, times in status.crash_loops.items():
        parts.append(Text(f"the {role} has died {times} times in a row, each time soon after its start", style="red"))
    if status.problems:
        counted = ", ".join(f"{count} × {reason}" for reason, count in sorted(status.problems.items()))
        parts.append(Text(f"problems dealt with: {counted}", style="dim"))
    return Group(*parts)


def _site(status: Status) -> str:
    """With whom this node is in one site, where the newest plan had sites."""
    if not status.history or status.history[-1].plan != "grouped":
        return ""
    names = {member.peer_id: member.name for member in status.member_list}
    others = [names.get(peer) or f"…{peer[-8:]}" for peer in status.group if peer != status.peer_id]
    return f"   in one site with {', '.join(others)}" if others else "   in a site of its own"


def _facts(status: Status, addresses: Iterable[str]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", min_width=len("lost lineage"))  # alike with and without that row
    table.add_column(overflow="fold")
    final = f" of {status.final_round}" if status.final_round else ""
    table.add_row("run", f"{status.run_name or '-'}  {short(status.run_id)}")
    table.add_row("round", f"{status.round}{final}   state {short(status.state_hash)}")
    table.add_row("members", f"{status.members} alive{_site(status)}")
    table.add_row("line", _line(status))
    losses = number(status.loss)
    if status.validation_loss is not None:
        losses += f"   validation {number(status.validation_loss)}"
    table.add_row("loss", losses)
    table.add_row("tokens", f"{quantity(status.tokens_total)} by the run   {quantity(status.tokens_per_s)}/s here")
    work = status.work
    lost = ", ".join(f"{quantity(tokens)} {reason}" for reason, tokens in work.discarded.items() if tokens)
    table.add_row(
        "work here",
        f"{quantity(work.produced_tokens)} trained = {quantity(work.counted_tokens)} counted + "
        f"{quantity(work.carried_tokens)} carried + {quantity(work.discarded_tokens)} lost"
        + (f" ({lost})" if lost else ""),
    )
    if status.engine_limits:
        table.add_row("engine", f"{status.engine}, which cannot hold: {', '.join(status.engine_limits)}")
    for one in status.lost_lineages:
        table.add_row(
            "lost lineage",
            f"{one.lineage[:8]}: {one.rounds} rounds since round {one.since_round} ({quantity(one.own_tokens)} tokens "
            f"of this node's) went with it; {one.followed[:8]} won",
        )
    trainer = status.trainer
    attached = f"{trainer.name} on {trainer.device}, step {trainer.step} of {trainer.budget_steps}"
    table.add_row("trainer", attached if trainer.attached else "none attached")
    resident = "  ".join(f"{name} {human(size)}" for name, size in status.resident_bytes.items())
    table.add_row("memory", resident or "-")
    table.add_row("disk", human(status.disk_bytes))
    if status.reach.control is not None or status.reach.data is not None:
        table.add_row("reachable", status.reach.advice or "yes")
    if status.reach.through or status.reach.not_joined:
        count = len(status.reach.through)
        joined = f"lead to {count} peer{'s' if count != 1 else ''}"
        lost = "".join(f"; not to {peer[-8:]}: {why}" for peer, why in sorted(status.reach.not_joined.items()))
        table.add_row("volunteers", joined + lost)
    if status.reach.relayed_bytes:
        table.add_row(
            "relaying",
            f"for {status.reach.relayed_pairs} pairs now; {human(status.reach.relayed_bytes)} so far",
        )
    table.add_row("peer id", status.peer_id)
    for address in addresses:
        table.add_row("join by", address)
    if status.exported:
        table.add_row("model", status.exported)
    return table


def history_table(rounds: Iterable[HistoryRound], status: Status) -> Table:
    """Whole on a terminal of 80 columns."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for title in ("round", "peers", "seconds", "loss", "validation", "sent", "bytes/\nparameter", "state"):
        table.add_column(title, justify="left" if title == "state" else "right", no_wrap=True)
    for one in rounds:
        density = one.bytes_sent / status.parameters if status.parameters else 0.0
        table.add_row(
            str(one.round),
            str(len(one.contributors)) + (f" (-{len(one.excluded)})" if one.excluded else ""),
            f"{one.seconds:.1f}",
            number(one.loss),
            number(one.validation_loss),
            human(one.bytes_sent),
            f"{density:.2f}",
            short(one.state_hash),
        )
    return table


def _line(status: Status) -> str:
    """What this node's line carries."""
    if status.line_age_s is None:
        return "not measured yet"
    return (
        f"{rate(status.up_bytes_s)} up   {rate(status.down_bytes_s)} down   at least, seen {age(status.line_age_s)} ago"
    )


def members_table(members: Iterable[MemberStatus], own: str) -> Table:
    """Whole on a terminal of 80 columns. Rates are in bytes per second, and of the link to each peer: to it, and from
    it; of this node's own row, over all links together."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    table.add_column("peer", no_wrap=True)
    table.add_column("name", no_wrap=True, max_width=10)
    table.add_column("is", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for title in ("round", "tokens/s", "latency", "up", "down", "age"):
        table.add_column(title, no_wrap=True, justify="right")
    for member in members:
        table.add_row(
            f"…{member.peer_id[-8:]}",
            "this node" if member.peer_id == own else member.name or "",
            _standing(member),
            member.state_hash[:6] if member.state_hash else "-",
            "-" if member.round is None else str(member.round),
            "-" if member.tokens_per_s is None else quantity(member.tokens_per_s),
            "-" if member.round_trip_ms is None else f"{member.round_trip_ms:.1f} ms",
            "-" if member.sent_bytes_s is None else quantity(member.sent_bytes_s),
            "-" if member.received_bytes_s is None else quantity(member.received_bytes_s),
            "-" if member.rates_age_s is None else age(member.rates_age_s),
        )
    return table


def _standing(member: MemberStatus) -> str:
    """In one word."""
    if member.member:
        return "member" if member.alive else "silent"
    return "alive" if member.alive or member.connected else "gone"


def rate(bytes_s: float | None) -> str:
    return "-" if bytes_s is None else f"{quantity(bytes_s)}B/s"


def age(seconds: float) -> str:
    """`45s`, `12m`, `3h`."""
    if seconds < 100:
        return f"{seconds:.0f}s"
    return f"{seconds / 60:.0f}m" if seconds < 6000 else f"{seconds / 3600:.0f}h"


def short(hexadecimal: str | None) -> str:
    return hexadecimal[:12] if hexadecimal else "-"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def quantity(value: float) -> str:
    """`12.3k`: three digits are enough for people."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"
