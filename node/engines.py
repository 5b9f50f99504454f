"""The engines that a manifest can name (`rounds.engine`), and what each cannot hold (design section 10).

One list for `status`, for operators and for the conformance suite, whose expected failures carry these names.
"""

from __future__ import annotations

ATOLL = "atoll"
HIVEMIND = "hivemind"

LIMITS: dict[str, dict[str, str]] = {
    ATOLL: {},
    HIVEMIND: {
        "stated-order": (
            "contributions are added in the order in which they come: a mean is right to its codec's error, not to the "
            "bit of the stated sum"
        ),
        "audit": "no mean can be recomputed by others, so a root that lies is not caught",
        "bound-bytes": (
            "what a peer gives to the averagers is not bound by its READY: it may give each root other values within "
            "its declared bound"
        ),
    },
}
"""Engine → name of an expected failure in `tests/swarm/test_conformance.py` → what it means, in one sentence."""
