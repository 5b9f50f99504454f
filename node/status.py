"""The schema of `status --json` and `peers --json` (design section 11): stable names, read by people's scripts."""

from __future__ import annotations

import msgspec

MAX_HISTORY_ROUNDS = 200
"""Finished rounds that `Status.history` keeps."""


class LastRound(msgspec.Struct, frozen=True, kw_only=True):
    """The newest committed round, as this node saw it."""

    round: int
    contributors: int
    """Peers counted in at least one part."""
    excluded: dict[str, str] = {}
    """Peer id → why it was not counted, in a few words."""
    seconds: float
    """From the commit before it to this one."""
    bytes_sent: int
    bytes_received: int
    assemble_s: float
    """From the first READY to the roster."""
    exchange_s: float
    """From the roster to the last part."""
    commit_s: float
    """From the last part to the applied commit."""


class HistoryRound(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the run's history."""

    round: int
    seconds: float
    contributors: tuple[str, ...] = ()
    """Peer ids counted in at least one part."""
    excluded: dict[str, str] = {}
    state_hash: str
    """Hex; of the state that the round led to."""
    lineage: str = ""
    """Hex; that committed it."""
    plan: str = ""
    """How bytes went: `flat`, or `grouped` by sites (`group` says with whom); empty: the round had no parts."""
    leader: str = ""
    """Peer id whose roster it was: the coordinator of the attempt that was decided."""
    loss: float | None = None
    """This node's mean training loss in the round."""
    validation_loss: float | None = None
    """Measured on the state that the round led to."""
    bytes_sent: int = 0
    bytes_received: int = 0
    tokens_total: int = 0
    """Tokens counted by the run up to and with this round."""
    committed_unix_s: float = 0.0
    """When this node had applied the commit, by this machine's clock."""


class MemberStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A peer as this node knows it: one row of `atoll peers`."""

    peer_id: str
    name: str | None = None
    addresses: tuple[str, ...] = ()
    connected: bool = False
    """A live control connection."""
    alive: bool = False
    """Heard within the run's heartbeat timeout."""
    member: bool = False
    """In the chain's member list, not only connected."""
    round: int | None = None
    state_hash: str | None = None
    tokens_per_s: float | None = None
    round_trip_ms: float | None = None
    """To it, smoothed; an answer that does not come counts as one that takes 5 s."""
    round_trip_age_s: float | None = None
    """Since its newest answer."""
    lost_answers: float | None = None
    """Share of the newest pings that it did not answer in time."""
    sent_bytes_s: float | None = None
    """To it, the best that was seen; the link carries at least that."""
    received_bytes_s: float | None = None
    """From it, likewise. Of this node's own row: over all links together."""
    rates_age_s: float | None = None
    """Since a transfer last told anything of either."""
    up_bytes_s: float | None = None
    """What its own line carries away, as it says in its record."""
    down_bytes_s: float | None = None
    version: str | None = None
    dropped: int = 0
    """Messages of it that were refused."""


class TrainerStatus(msgspec.Struct, frozen=True, kw_only=True):
    attached: bool = False
    name: str | None = None
    device: str | None = None
    step: int = 0
    """Inner steps of this round."""
    budget_steps: int = 0
    """Inner steps after which it contributes."""


class WorkTotals(msgspec.Struct, frozen=True, kw_only=True):
    """The account to the last token. In part-tokens: a token that is trained is one in each of the vector's parts."""

    parts: int = 1
    produced: int = 0
    counted: int = 0
    carried: int = 0
    discarded: dict[str, int] = {}
    """By reason."""

    @property
    def missing(self) -> int:
        """Zero, always: produced − counted − carried − discarded."""
        return self.produced - self.counted - self.carried - sum(self.discarded.values())


class WorkStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Invariant 3: produced = counted + carried + discarded, over all lives of this node; tokens, rounded down."""

    produced_tokens: int = 0
    """Trained by this node."""
    counted_tokens: int = 0
    """In commits of the chain."""
    carried_tokens: int = 0
    """In the local model, or frozen for the present round; in no commit yet."""
    discarded_tokens: int = 0
    """Lost, and said so."""
    discarded: dict[str, int] = {}
    """The same by reason."""
    since_unix_s: float = 0.0
    """When the account began, by this machine's clock: with this home's first part in the run."""
    exact: WorkTotals = WorkTotals()


class AuditStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Committed parts that this node recomputed from their contributions (protocol section 7)."""

    right: int = 0
    wrong: int = 0
    skipped: dict[str, int] = {}
    """Audits that came to nothing, by reason."""
    seconds: float = 0.0
    """Spent on all of them, waiting included."""
    bytes_received: int = 0


class ReachStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Whether peers can dial this node, as they found when they tried (`node.daemon.reachability`)."""

    control: bool | None = None
    """The port of `--listen`; None: nobody has tried yet."""
    data: bool | None = None
    """The port of `--data-port`, likewise."""
    seen_at: str | None = None
    """The IP address from which peers see it come."""
    advice: str = ""
    """What to do, in one sentence, when it is not reachable."""
    through: dict[str, str] = {}
    """Connected peers that neither can be dialled nor dial → the volunteer that joins this node with them."""
    not_joined: dict[str, str] = {}
    """Such peers that no volunteer joins it with → why."""
    relayed_pairs: int = 0
    """Pairs that this node joins as a volunteer now."""
    relayed_bytes: int = 0
    """Passed on for such pairs since the start."""


class LostLineage(msgspec.Struct, frozen=True, kw_only=True):
    """A lineage that this node was on, that lost against another, and was given up (protocol section 10)."""

    lineage: str
    """Hex."""
    followed: str
    """The one that won."""
    since_round: int
    """Where the two parted."""
    rounds: int
    """Committed on it since then."""
    tokens: int
    """Counted in those by all of its members."""
    own_tokens: int
    """And by this node; they are in `work.discarded` too."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """One node's answer to "what is going on?"."""

    peer_id: str
    name: str | None = None
    version: str
    addresses: tuple[str, ...] = ()
    """Multiaddrs with `/p2p/PEER_ID`: any of them is enough for another to join."""
    run_id: str | None = None
    """Hex; None: the manifest has not arrived yet."""
    run_name: str | None = None
    phase: str
    """`starting`, `joining`, `catching-up`, `waiting`, `training`, `exchanging`, `committing`, `leaving`, `finished`"""
    reason: str
    """One sentence: what this node is waiting for."""
    round: int = 0
    """The round being worked on: the number of commits applied."""
    final_round: int | None = None
    state_hash: str | None = None
    lineage: str | None = None
    left_lineage: str | None = None
    """This node's own, kept until the one that won has taken it in; see `reason`."""
    lost_lineages: tuple[LostLineage, ...] = ()
    """Given up since the start, newest last."""
    members: int = 0
    """Members alive, this node included."""
    member_list: tuple[MemberStatus, ...] = ()
    """All known peers of the run, this node included."""
    group: tuple[str, ...] = ()
    """Peer ids of this node's group in the newest round's plan; all members where that has no groups."""
    electors: tuple[str, ...] = ()
    """Peer ids of the members whose votes decide this round."""
    attempt: int = 0
    """Attempt of this round that is under way here, from 0."""
    coordinator: str | None = None
    """Peer id of who leads that attempt; None while this node follows no round."""
    tokens_total: int = 0
    """Tokens counted by the run."""
    tokens_per_s: float = 0.0
    """Training speed of this node."""
    up_bytes_s: float | None = None
    """What this node's line was seen to carry away, over all links together; None: not measured yet."""
    down_bytes_s: float | None = None
    """What it was seen to bring in."""
    line_age_s: float | None = None
    """Since a transfer last told anything of either."""
    loss: float | None = None
    """Training loss of this node, newest."""
    validation_loss: float | None = None
    last_round: LastRound | None = None
    history: tuple[HistoryRound, ...] = ()
    """Newest last, at most `MAX_HISTORY_ROUNDS`."""
    trainer: TrainerStatus = TrainerStatus()
    work: WorkStatus = WorkStatus()
    reach: ReachStatus = ReachStatus()
    parameters: int = 0
    """Elements of the outer state's vector."""
    disk_bytes: int = 0
    """Used by parts, snapshots and artifacts of this run."""
    storage_able: bool = True
    """False while the disk refuses what must be kept: this node takes part in no round until it works."""
    engine: str | None = None
    """What averages: the manifest's `rounds.engine`."""
    engine_limits: dict[str, str] = {}
    """What that engine cannot hold, by name (`node.engines`); empty with `atoll`."""
    resident_bytes: dict[str, int] = {}
    """Process ("supervisor", "daemon", "engine", "trainer") → resident memory."""
    audits: AuditStatus = AuditStatus()
    caught: dict[str, str] = {}
    """Peers that are left out for good → what evidence they gave."""
    crash_loops: dict[str, int] = {}
    """Process → times in a row that it died within half a minute of its start; it is started again ever later."""
    problems: dict[str, int] = {}
    """What went wrong and was dealt with, counted by reason, since the start."""
    http: str | None = None
    """`HOST:PORT` of the status server, when it is on."""
    exported: str | None = None
    """Directory of the finished run's model, once it is written."""
    uptime_s: float = 0.0


class Peers(msgspec.Struct, frozen=True, kw_only=True):
    """`peers --json`."""

    peer_id: str
    peers: tuple[MemberStatus, ...] = ()


class ExportPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `POST /export`: a snapshot on this node's disk that holds the current state."""

    run_id: str
    round: int
    state_hash: str
    snapshot: str
    """Absolute path."""
