"""hivemind on one host: its `DecentralizedAverager`, in an environment of its own (`hivemind.txt`).

Matchmaking ends when the group stands; the exchange begins when all are told to go on (`require_trigger`).
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import torch
from hivemind import DHT
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import AveragingStage, StepControl
from hivemind.compression import CompressionBase, Float16Compression, Uniform8BitQuantization

from scripts.benchmark.worker import Place, serve

MATCHMAKING_S = 3.0
"""`min_matchmaking_time`: the group is begun earlier, when all are there."""
STAGE_POLL_S = 0.001
"""hivemind has no event for a stage that is reached."""
CODECS: dict[str, type[CompressionBase]] = {"fp16": Float16Compression, "uniform8": Uniform8BitQuantization}


class Hivemind:
    def __init__(self, place: Place) -> None:
        self._place = place
        self._dht: DHT | None = None
        self._averager: DecentralizedAverager | None = None
        self._step: StepControl | None = None

    def open(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Start the DHT node and the averager; answers with the node's address, which the others begin with."""
        self._dht = DHT(
            initial_peers=asked["initial_peers"],
            start=True,
            host_maddrs=[f"/ip4/{self._place.address}/tcp/0"],
            use_relay=False,
            use_auto_relay=False,
            nat_port_map=False,
            auto_nat=False,
        )
        self._averager = DecentralizedAverager(
            [torch.zeros(self._place.elements)],
            self._dht,
            start=True,
            prefix="bench",
            target_group_size=self._place.hosts,
            min_group_size=self._place.hosts,
            min_matchmaking_time=MATCHMAKING_S,
            request_timeout=MATCHMAKING_S / 2,
            compression=CODECS[self._place.codec](),
            allreduce_timeout=self._place.patience_s,
            sender_timeout=self._place.patience_s,
            allow_state_sharing=False,
        )
        return {"addresses": [str(address) for address in self._dht.get_visible_maddrs()]}

    def load(self, asked: dict[str, Any]) -> None:
        assert self._averager is not None
        with self._averager.get_tensors() as (tensor,):
            np.multiply(self._place.input(), np.float32(asked["scale"]), out=tensor.numpy())

    def match(self, asked: dict[str, Any]) -> None:
        assert self._averager is not None
        self._step = self._averager.step(
            wait=False, require_trigger=True, allow_retries=False, timeout=self._place.patience_s
        )
        deadline_s = time.monotonic() + self._place.patience_s
        while self._step.stage in (AveragingStage.IDLE, AveragingStage.LOOKING_FOR_GROUP):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"no group of {self._place.hosts} within {self._place.patience_s:.0f} s")
            time.sleep(STAGE_POLL_S)
        if self._step.done():
            self._step.result()

    def exchange(self, asked: dict[str, Any]) -> None:
        assert self._step is not None
        self._step.allow_allreduce()
        group = self._step.result(timeout=self._place.patience_s)
        if len(group) != self._place.hosts:
            raise RuntimeError(f"a group of {len(group)} of {self._place.hosts} hosts averaged")

    def decode(self, asked: dict[str, Any]) -> None:
        assert self._averager is not None
        with self._averager.get_tensors() as (tensor,):
            self._place.result()[:] = tensor.numpy()

    def close(self) -> None:
        if self._averager is not None:
            self._averager.shutdown()
        if self._dht is not None:
            self._dht.shutdown()


def main() -> None:
    place = Place.from_arguments()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // place.hosts))
    hivemind = Hivemind(place)
    try:
        serve(
            {
                "open": hivemind.open,
                "load": hivemind.load,
                "match": hivemind.match,
                "exchange": hivemind.exchange,
                "decode": hivemind.decode,
            }
        )
    finally:
        hivemind.close()


if __name__ == "__main__":
    main()
