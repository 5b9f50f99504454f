"""What one machine does: network, disk, GPU, processes, people (docs/design.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from node.trainer.attach import Swarm, attach
    from node.trainer.errors import NoDaemon

__version__ = "0.1.0"
__all__ = ["NoDaemon", "Swarm", "__version__", "attach"]


def __getattr__(name: str) -> Any:
    # Lazy: the supervisor and the daemon import `node` and must not pay for PyTorch.
    if name in {"Swarm", "attach"}:
        from node.trainer import attach as module

        return getattr(module, name)
    if name == "NoDaemon":
        from node.trainer.errors import NoDaemon

        return NoDaemon
    raise AttributeError(f"module 'node' has no attribute {name!r}")
