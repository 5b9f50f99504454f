"""Whether a received payload is what its sender signed, decodes, and stays within its declared bound. For threads."""

from __future__ import annotations

from node.engine import api
from node.engine.geometry import Geometry
from node.peer_id import verify
from protocol.codecs import LARGEST_MAGNITUDE, CodecError
from protocol.commitment import proves
from protocol.messages import PartHeader
from protocol.names import Digest
from protocol.state_hash import chunk_hash
from protocol.stations import Station
from protocol.sums import partial_bound
from protocol.wire import signing_bytes


class UpChecks:
    def __init__(self, request: api.Exchange, station: Station, geometry: Geometry) -> None:
        self._parts_roots = request.parts_roots
        self._largest = request.largest or (LARGEST_MAGNITUDE,) * len(request.peers)
        self._station = station
        self._geometry = geometry

    def why_bad(self, sender: int, part: int, bitmap: int, proof: bytes, payload: bytearray) -> str:
        """Empty: the payload of an UP is good."""
        elements = self._geometry.part_size(part)
        if self._station.sends_partial(sender, part):
            bound = partial_bound(self._station.weights(part), bitmap, self._largest)
            try:
                self._geometry.sum_codec.check(payload, elements, largest=bound)
            except CodecError:
                return "UP whose partial sum does not decode or is beyond its contributors' bounds"
            return ""
        try:
            self._geometry.codec.check(payload, elements, largest=min(self._largest[sender], LARGEST_MAGNITUDE))
        except CodecError:
            return "UP whose values do not decode or are beyond the declared bound"
        root, part_count = self._parts_roots[sender], self._geometry.part_count
        if not proves(root, part, part_count, chunk_hash(payload), proof):
            return "UP whose bytes are not those that its READY binds"
        return ""


def why_bad_part(
    payload: bytes | bytearray,
    *,
    part: int,
    part_hash: Digest,
    root: str,
    body: bytes,
    signature: bytes,
    geometry: Geometry,
) -> str:
    """Empty: `payload` is the part that `root` signed in `body`, and every value in it is finite."""
    if chunk_hash(payload) != part_hash:
        return "a part whose bytes do not match its header"
    try:
        geometry.codec.check(payload, geometry.part_size(part))
    except CodecError:
        return "a part that does not decode"
    if not verify(root, signing_bytes(PartHeader, body), signature):
        return "a part whose header is not signed by its root"
    return ""
