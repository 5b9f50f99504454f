"""Those whom a node knew when it ended: it looks for them before it acts on what it remembers.

A node that starts again alone works on the state of its last day. Two of them that find each other first are a majority
of what they remember, and would undo everything that those who lived have trained without them since.
"""

from __future__ import annotations

import trio

from node.daemon.network import Network
from node.daemon.observations import Observations
from protocol.chain import ChainState

LOOKING_S = 5.0
"""At most: discovery re-dials remembered peers at once, and who is reachable is connected after a few round trips."""


async def look_for(state: ChainState, network: Network, observations: Observations, fork_timeout_s: float) -> None:
    """Until every other member of `state` is connected, or for half of `fork_timeout_s`, at most `LOOKING_S`.

    A node that holds nothing yet has nothing to look for: the peer that gave it the run tells it the rest.
    """
    if state.base.round == 0:
        return
    known = {peer for peer, _ in state.members} - {network.peer_id}
    with trio.move_on_after(min(LOOKING_S, fork_timeout_s / 2)):
        while missing := known - network.peers.keys():
            observations.setting_up("catching-up", f"looking for {len(missing)} of the {len(known)} members it knew")
            await network.links_changed().wait()
