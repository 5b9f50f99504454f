"""A trainer with a loader process of its own: `patient` waits, `obedient` ends at SIGTERM, `fails` exits with 2."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

mode = sys.argv[1]
if mode == "fails":
    sys.stderr.write("the function corpus:load is not allowed; add --allow-function corpus:load\n")
    sys.exit(2)
loader = subprocess.Popen(["sleep", "1000"])
(Path(os.environ["ATOLL_HOME"]) / "loader.pid").write_text(str(loader.pid))
if mode == "patient":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    signal.pause()
