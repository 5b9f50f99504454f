"""The few errors that cross module borders. Each message names the value and the fix."""

from __future__ import annotations


class AtollError(Exception):
    """Base of all our errors."""


class OperatorError(AtollError):
    """Bad input from the operator: printed as one sentence, exit status 2."""


class StrangerError(AtollError):
    """Bad input from another peer: dropped, counted, logged once; never leaves the connection's handler."""
