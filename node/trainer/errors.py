"""What can go wrong for a program that trains in a swarm. The network never raises; these are local.

No PyTorch here: `node` re-exports `NoDaemon`, and the command line imports it.
"""

from __future__ import annotations

from node.errors import AtollError, OperatorError


class NoDaemon(OperatorError):
    """No daemon of this home answers on the attach socket."""


class AttachRefused(OperatorError):
    """The daemon answered and refused; the message is its sentence."""


class RunChanged(OperatorError):
    """After a reconnection the daemon serves another run than the one this program trains."""


class LayoutMismatch(OperatorError):
    """The program's model is not the run's model."""


class TrainerError(AtollError):
    """The trainer cannot go on: out of memory, a missing device, data that cannot be read."""
