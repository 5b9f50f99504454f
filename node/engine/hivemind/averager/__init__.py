"""hivemind's `DecentralizedAverager` over the rosters that it is told, in a process of its own.

Runs in an interpreter that has hivemind and may have nothing else of ours: every module here imports the standard
library, NumPy, PyTorch, hivemind, and its siblings only. `start.py` is the program; `process` says how it is talked to.
"""
