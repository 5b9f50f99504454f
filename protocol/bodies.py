"""Bodies: each message to protobuf and back, with every bound that makes a stranger's bytes safe to hold.

`protocol.wire` wraps bodies into signed envelopes. Sizes are checked before anything nested is parsed; numbers are
finite, within range and countable; signed messages inside others keep their body bytes verbatim.
"""

from __future__ import annotations

from protocol import decision_bodies, lineage_bodies, roster_bodies
from protocol.messages import (
    Commit,
    Evidence,
    Fetch,
    Have,
    Heartbeat,
    Join,
    Leave,
    PartHeader,
    Proposal,
    Ready,
    Reform,
    Reformed,
    ReformVote,
    Roster,
    Vote,
)
from protocol.nested import BODIES, MAX_BODY_BYTES, decode_body, encode_body, make_signed
from protocol.pb import round_pb2 as pb

__all__ = ["MAX_BODY_BYTES", "decode_body", "encode_body", "make_signed"]

BODIES.update(
    {
        Ready: (pb.Ready, roster_bodies.get_ready, roster_bodies.put_ready),
        Join: (pb.Join, roster_bodies.get_join, roster_bodies.put_join),
        Leave: (pb.Leave, roster_bodies.get_leave, roster_bodies.put_leave),
        Roster: (pb.Roster, roster_bodies.get_roster, roster_bodies.put_roster),
        PartHeader: (pb.PartHeader, decision_bodies.get_part_header, decision_bodies.put_part_header),
        Proposal: (pb.Proposal, decision_bodies.get_proposal, decision_bodies.put_proposal),
        Vote: (pb.Vote, decision_bodies.get_vote, decision_bodies.put_vote),
        Commit: (pb.Commit, decision_bodies.get_commit, decision_bodies.put_commit),
        Reform: (pb.Reform, lineage_bodies.get_reform, lineage_bodies.put_reform),
        ReformVote: (pb.ReformVote, lineage_bodies.get_reform_vote, lineage_bodies.put_reform_vote),
        Reformed: (pb.Reformed, lineage_bodies.get_reformed, lineage_bodies.put_reformed),
        Heartbeat: (pb.Heartbeat, lineage_bodies.get_heartbeat, lineage_bodies.put_heartbeat),
        Fetch: (pb.Fetch, lineage_bodies.get_fetch, lineage_bodies.put_fetch),
        Have: (pb.Have, lineage_bodies.get_have, lineage_bodies.put_have),
        Evidence: (pb.Evidence, roster_bodies.get_evidence, roster_bodies.put_evidence),
    }
)
