"""gloo on one host: `torch.distributed`'s all-reduce over the process group of all hosts."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from scripts.benchmark.worker import Place, serve

PORT = 29400
TYPES = {"fp16": torch.float16, "fp32": torch.float32}


class Gloo:
    def __init__(self, place: Place) -> None:
        self._place = place
        self._type = TYPES[place.codec]
        self._loaded = torch.empty(place.elements, dtype=torch.float32)
        self._sum = torch.empty(place.elements, dtype=self._type)

    def open(self, asked: dict[str, Any]) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "wan0"
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{self._place.first_address}:{PORT}",
            rank=self._place.index,
            world_size=self._place.hosts,
            timeout=timedelta(seconds=self._place.patience_s),
        )

    def load(self, asked: dict[str, Any]) -> None:
        np.multiply(self._place.input(), np.float32(asked["scale"]), out=self._loaded.numpy())

    def encode(self, asked: dict[str, Any]) -> None:
        self._sum.copy_(self._loaded)

    def exchange(self, asked: dict[str, Any]) -> None:
        dist.all_reduce(self._sum)

    def decode(self, asked: dict[str, Any]) -> None:
        self._sum /= self._place.hosts
        torch.from_numpy(self._place.result()).copy_(self._sum)


def main() -> None:
    place = Place.from_arguments()
    # As many hosts as there are share this machine's cores.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // place.hosts))
    gloo = Gloo(place)
    serve(
        {"open": gloo.open, "load": gloo.load, "encode": gloo.encode, "exchange": gloo.exchange, "decode": gloo.decode}
    )


if __name__ == "__main__":
    main()
