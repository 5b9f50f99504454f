"""One of two ranks of a program under `torch.distributed`: HOME, RANK.

Trains two rounds replicated (DDP) and two sharded (FSDP2), and writes what it ends with to `HOME/rank-N.json`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from attach_daemon import small_model
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import node


def train(home: Path, model: torch.nn.Module, until: int) -> dict[str, object]:
    inner = torch.optim.AdamW(model.parameters(), lr=5e-3)
    seen = []
    with node.attach(home) as swarm:
        outer = swarm.optimizer(model, inner)
        for batch in outer.batches(batch_size=2):
            seen.append(batch["input_ids"].sum().item())
            model(**batch).loss.backward()
            inner.step()
            inner.zero_grad()
            if outer.step(tokens=batch["input_ids"].numel(), loss=1.0) and outer.round == until:
                break
        whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
        checksum = [float(tensor.double().sum()) for tensor in whole]
        return {"round": outer.round, "seen": seen, "checksum": checksum}


def main() -> None:
    home, rank = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{home}/rendezvous", rank=rank, world_size=2)
    replicated = train(home, torch.nn.parallel.DistributedDataParallel(small_model(seed=rank)), until=2)
    sharded = small_model(seed=10 + rank)
    fully_shard(sharded)
    result = {"replicated": replicated, "sharded": train(home, sharded, until=4)}
    (home / f"rank-{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
