"""`python -m node.trainer`: the trainer process, started by the supervisor. The home comes from `ATOLL_HOME`.

Exit status: 0 the run is over; 1 start me again; 2 only the operator can help; 143 SIGTERM came, and whoever still
wants a trainer starts another. The last line on stderr says why.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

import torch

import node
from node.errors import AtollError, OperatorError
from node.trainer.attach import Swarm
from node.trainer.errors import AttachRefused, NoDaemon, RunChanged
from node.trainer.loop import TrainingLoop

DAEMON_WAIT_S = 60.0
"""The supervisor starts this process when the daemon wants one, so its socket is there or soon will be."""
EXIT_FINISHED = 0
EXIT_AGAIN = 1
EXIT_OPERATOR_ERROR = 2
EXIT_TERMINATED = 128 + signal.SIGTERM

logger = logging.getLogger(__name__)


def main() -> int:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="trainer: %(message)s")
    signal.signal(signal.SIGTERM, _end)
    _import_models()
    try:
        swarm = node.attach(name="atoll trainer", wait_s=DAEMON_WAIT_S)
    except (NoDaemon, AttachRefused) as error:
        logger.error("%s", error)
        return EXIT_AGAIN
    with swarm:
        return _train(swarm)


def _import_models() -> None:
    """Seconds of imports that building nearly any model needs, before the Welcome: after it, commits wait for us."""
    importlib.import_module("transformers.models.llama.modeling_llama")


def _train(swarm: Swarm) -> int:
    try:
        TrainingLoop(swarm).run()
    except RunChanged as error:
        logger.error("%s", error)
        return EXIT_AGAIN
    except AtollError as error:
        swarm.report_failure(str(error))
        logger.error("%s", error)
        return EXIT_OPERATOR_ERROR if isinstance(error, OperatorError) else EXIT_AGAIN
    except (torch.OutOfMemoryError, MemoryError) as error:
        reason = (
            f"out of memory while training ({_one_line(error)}): free memory on this machine, or join a run with a "
            "smaller inner.micro_batch_sequences"
        )
    except Exception as error:
        # Whatever a model, a dataset or PyTorch raises: status gets its sentence, the log its traceback.
        logger.exception("training failed")
        reason = f"training failed with {type(error).__name__}: {_one_line(error)}"
    else:
        return EXIT_FINISHED
    swarm.report_failure(reason)
    logger.error("%s", reason)
    return EXIT_AGAIN


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(EXIT_TERMINATED)


def _run() -> NoReturn:
    """Ends without taking PyTorch's thousands of modules apart: more than a second of CPU time for nothing, and at
    leaving, when a machine is busy, more than there is until SIGKILL. Nothing here needs it: files are renamed into
    place when they are whole, and the daemon has had its Goodbye.
    """
    try:
        code = main()
    except SystemExit as ended:
        code = EXIT_FINISHED if ended.code is None else ended.code if isinstance(ended.code, int) else EXIT_AGAIN
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    _run()
