"""The supervisor: keeps the daemon, the engine and the trainer alive, and ends them all in order."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from functools import partial
from typing import Any

from node.home import Home
from node.memory import resident_bytes
from node.supervisor import link
from node.supervisor.child import Child, describe_exit
from node.supervisor.engine_port import EnginePort
from node.supervisor.lock import remove_live_files, write_daemon_file
from node.supervisor.loop import Loop
from node.supervisor.output import BoundedLog, PipeReader, Terminal
from node.supervisor.roles import Commands, Patience, small_process, trainer_process
from node.supervisor.segments import NotEnoughMemory

EXIT_FINISHED = 0
EXIT_GAVE_UP = 1
EXIT_OPERATOR_ERROR = 2
EXIT_FALLEN = 3
"""The daemon found what it must not go on from; starting it again would change nothing."""


class Supervisor:
    """Runs until the daemon has finished, has failed for good, or a signal asked for the end."""

    def __init__(
        self,
        home: Home,
        commands: Commands,
        *,
        patience: Patience | None = None,
        output: Terminal | None = None,
        errors: Terminal | None = None,
        end_with: int | None = None,
    ) -> None:
        """`end_with`: a process id; when that process ends, so does this node, as if by SIGTERM."""
        self._home = home
        self._patience = patience or Patience()
        self._output = output or Terminal(1)
        self._errors = errors or Terminal(2)
        self._log = BoundedLog(home.log_file)
        self._loop = Loop()
        self._daemon = Child(name="daemon", command=commands.daemon, environment=small_process())
        self._engine = Child(name="engine", command=commands.engine, environment=small_process())
        self._trainer = Child(name="trainer", command=commands.trainer, environment=trainer_process())
        self._viewer = Child(name="viewer", command=commands.viewer)
        self._children = (self._daemon, self._engine, self._trainer, self._viewer)
        self._port = EnginePort()
        self._listened = False
        self._refusal: str | None = None
        """The daemon's sentence to the operator, before it exits with status 2."""
        self._leave_deadline_s: float | None = None
        self._end_by_s: float | None = None
        """When a signal asked for the end: the time by which SIGKILL comes."""
        self._exit_code: int | None = None
        self._end_with = end_with

    # ------------------------------------------------------------ the loop

    def run(self) -> int:
        """Returns the exit status. Everything started here has ended by then."""
        wanted = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
        with self._loop.signals(*wanted, on_signal=self._on_signal):
            try:
                self._daemon.wanted = True
                self._start(self._daemon)
                self._watch_owner()
                while self._exit_code is None:
                    self._loop.turn(self._next_deadline_s())
                    self._collect_exits()
                    self._act_on_time()
                self._end_children()
            finally:
                self._clean_up()
        self._loop.close()
        return self._exit_code

    def _watch_owner(self) -> None:
        if self._end_with is None:
            return
        try:
            owner = os.pidfd_open(self._end_with)
        except ProcessLookupError:
            self._leave()
            return

        def ended() -> None:
            self._loop.forget(owner)
            os.close(owner)
            self._leave()

        self._loop.watch(owner, ended)

    def _next_deadline_s(self) -> float | None:
        deadlines = [self._leave_deadline_s]
        for child in self._children:
            deadlines += [child.restart_at_s, child.kill_at_s]
        return min((at_s for at_s in deadlines if at_s is not None), default=None)

    def _act_on_time(self) -> None:
        now_s = time.monotonic()
        for child in self._children:
            if child.kill_at_s is not None and now_s >= child.kill_at_s:
                child.kill_at_s = None
                child.kill_group()
            if child.restart_at_s is not None and now_s >= child.restart_at_s and self._exit_code is None:
                self._start(child)
        if self._leave_deadline_s is not None and now_s >= self._leave_deadline_s:
            self._note(f"the daemon did not leave within {self._patience.leave_s:.1f} s; ending it")
            self._finish(EXIT_FINISHED)

    def _on_signal(self, number: int) -> None:
        if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self._leave()

    def _leave(self) -> None:
        """First time: the daemon may take its leave. Second time: the end, now."""
        if self._exit_code is not None:
            return
        if self._leave_deadline_s is not None or not self._daemon.running:
            self._end_by_s = time.monotonic()
            self._finish(EXIT_FINISHED)
            return
        now_s = time.monotonic()
        self._leave_deadline_s = now_s + self._patience.leave_s
        self._end_by_s = now_s + self._patience.total_s
        self._daemon.wanted = False
        self._daemon.signal(signal.SIGTERM)
        self._stop_viewer()
        self._show(b"leaving")

    # ------------------------------------------------------------ children

    def _start(self, child: Child) -> None:
        link_type = {"daemon": socket.SOCK_SEQPACKET, "engine": socket.SOCK_STREAM}.get(child.name)
        stdout = None if child is self._viewer else subprocess.PIPE
        now_s = time.monotonic()
        try:
            child.start(now_s, link_type=link_type, stdout=stdout)
        except (OSError, subprocess.SubprocessError) as error:
            child.started_s = now_s
            self._note(f"the {child.name} cannot be started ({error}); {_again(child.schedule_restart(now_s))}")
            return
        self._write_log(f"{child.name} started as process {child.pid}")
        self._watch_output(child)
        if child is self._daemon:
            assert child.link is not None
            self._loop.watch(child.link.fileno(), self._on_request)
        elif child is self._engine:
            if self._port.has_waiting_connection:
                self._connect_engine()
            elif child.starts > 1:
                self._tell_daemon({"event": "engine_restarted", "life": child.starts})

    def _watch_output(self, child: Child) -> None:
        assert child.process is not None
        prefix = child.name.encode() + b": "

        def log(line: bytes) -> None:
            if any(letter.isalnum() for letter in line.decode(errors="replace")):  # not a traceback's frame
                child.last_words = line.decode(errors="replace").strip(" |+-")
            self._log.line(prefix + line)

        for stream, on_line in (
            (child.process.stdout, self._show if child is self._daemon else log),
            (child.process.stderr, log),
        ):
            if stream is not None:
                reader = PipeReader(stream.fileno(), on_line)
                child.readers.append(reader)
                self._loop.watch(stream.fileno(), partial(self._read_output, reader))

    def _read_output(self, reader: PipeReader) -> None:
        reader.read()
        if reader.ended:
            self._loop.forget(reader.descriptor)

    def _collect_exits(self) -> None:
        for child in self._children:
            if child.running and child.exited():
                code = self._reap(child)
                if self._exit_code is None:
                    self._on_exit(child, code)

    def _reap(self, child: Child) -> int:
        if child is self._daemon:
            while self._on_request():  # what it asked for last: `fatal`, as a rule
                pass
        for reader in child.readers:
            self._loop.forget(reader.descriptor)
        if child.link is not None:
            self._loop.forget(child.link.fileno())
        code = child.reap()
        self._write_log(f"{child.name} ended: {describe_exit(code)}")
        return code

    def _on_exit(self, child: Child, code: int) -> None:
        if child is self._daemon:
            self._on_daemon_exit(code)
        elif child is self._trainer:
            self._on_trainer_exit(code)
        elif child.wanted:
            self._restart(child, code)

    def _restart(self, child: Child, code: int) -> float:
        delay_s = child.schedule_restart(time.monotonic())
        words = f" ({child.last_words:.200})" if code > 0 and child.last_words else ""
        self._note(f"the {child.name} ended by {describe_exit(code)}{words}; {_again(delay_s)}")
        return delay_s

    def _on_daemon_exit(self, code: int) -> None:
        self._leave_deadline_s = None
        if code == EXIT_OPERATOR_ERROR:
            self._stop_viewer()
            sentence = self._refusal or self._daemon.last_words or f"the daemon refused to run; see {self._log.path}"
            self._errors.line(sentence.encode())
            self._finish(EXIT_OPERATOR_ERROR)
        elif code == EXIT_FINISHED or not self._daemon.wanted:
            self._finish(EXIT_FINISHED)
        elif code == EXIT_FALLEN:
            words = self._daemon.last_words or describe_exit(code)
            self._note(f"the node has stopped and is not started again ({words:.400}); see {self._log.path}")
            self._finish(EXIT_FALLEN)
        elif not self._listened and self._daemon.starts >= self._patience.failed_starts:
            words = self._daemon.last_words or describe_exit(code)
            self._note(
                f"the daemon died {self._daemon.starts} times before it listened ({words}); see {self._log.path}"
            )
            self._finish(EXIT_GAVE_UP)
        else:
            self._restart(self._daemon, code)

    def _on_trainer_exit(self, code: int) -> None:
        reason = self._trainer.last_words if code != EXIT_FINISHED else "finished"
        if code in (EXIT_FINISHED, EXIT_OPERATOR_ERROR):
            self._trainer.wanted = False
        delay_s = self._restart(self._trainer, code) if self._trainer.wanted else None
        self._tell_daemon(
            {
                "event": "trainer_exited",
                "code": code,
                "reason": reason or describe_exit(code),
                "restart_in_s": delay_s,
                "crashes": self._trainer.crashes,
            }
        )

    # ------------------------------------------------------------ the daemon's requests

    def _on_request(self) -> bool:
        """Answer one request. False: there is none, or the link has ended."""
        daemon = self._daemon.link
        if daemon is None:
            return False
        descriptors: tuple[int, ...] = ()
        try:
            request = link.receive(daemon)
            if request is None:
                self._loop.forget(daemon.fileno())
                return False
            answer, descriptors = self._answer(request)
        except BlockingIOError:
            return False
        except (link.BadRequest, NotEnoughMemory) as error:
            answer = {"ok": False, "error": str(error)}
        self._send(daemon, answer, descriptors)
        if descriptors:
            os.close(descriptors[0])
        return True

    def _answer(self, request: dict[str, Any]) -> tuple[dict[str, Any], tuple[int, ...]]:
        try:
            match request["op"]:
                case "start_engine":
                    sizes = request["bytes"]
                    return self._start_engine((int(sizes["theta"]), int(sizes["momentum"]), int(sizes["delta"])))
                case "start_trainer":
                    self._start_trainer()
                case "stop_trainer":
                    self._stop_trainer()
                case "listening":
                    self._on_listening([str(address) for address in request["addresses"]], request["http"] or "off")
                case "processes":
                    pids = {"supervisor": os.getpid()} | {
                        child.name: child.pid for child in self._children if child.pid
                    }
                    resident = {name: resident_bytes(pid) for name, pid in pids.items()}
                    now_s = time.monotonic()
                    crashes = {child.name: child.crashes for child in self._children if child.is_looping(now_s)}
                    return {"ok": True, "pids": pids, "resident_bytes": resident, "crashes": crashes}, ()
                case "fatal":
                    self._refusal = str(request["error"])
                case unknown:
                    raise link.BadRequest(f"the supervisor knows no request {unknown!r}")
        except (KeyError, TypeError, ValueError) as error:
            raise link.BadRequest(f"a request of the daemon lacks something: {error!r} in {request!r:.200}") from error
        return {"ok": True}, ()

    def _start_engine(self, sizes: tuple[int, int, int]) -> tuple[dict[str, Any], tuple[int, ...]]:
        if self._engine.running and self._engine.exited():
            # The daemon saw its connection end before we saw the process end: do not hand it to the dead.
            self._on_exit(self._engine, self._reap(self._engine))
        fresh, descriptors = self._port.connect(sizes)
        self._engine.wanted = True
        if self._engine.running:
            self._connect_engine()
        elif self._engine.restart_at_s is None:
            self._start(self._engine)
        life = self._engine.starts if self._engine.running else self._engine.starts + 1
        return {"ok": True, "fresh": fresh, "life": life}, descriptors

    def _connect_engine(self) -> None:
        assert self._engine.link is not None
        try:
            self._port.hand_over(self._engine.link)
        except OSError as error:
            self._write_log(f"the engine did not take a connection ({error})")

    def _start_trainer(self) -> None:
        self._trainer.wanted = True
        if not self._trainer.running and self._trainer.restart_at_s is None:
            self._start(self._trainer)

    def _stop_trainer(self) -> None:
        self._trainer.wanted = False
        self._trainer.restart_at_s = None
        if self._trainer.running:
            self._trainer.signal(signal.SIGTERM)
            self._trainer.kill_at_s = time.monotonic() + self._patience.trainer_stop_s

    def _on_listening(self, addresses: list[str], http: str) -> None:
        content: dict[str, object] = {
            "pid": os.getpid(),
            "daemon_pid": self._daemon.pid,
            "control_socket": str(self._home.control_socket),
            "attach_socket": str(self._home.attach_socket),
            "addresses": addresses,
            "http": http,
        }
        try:
            write_daemon_file(self._home, content)
        except OSError as error:
            self._note(f"{self._home.daemon_file} cannot be written ({error.strerror}); the node runs on without it")
        if self._listened:
            return
        self._listened = True
        for address in addresses:
            self._show(f"listening on {address}".encode())
        if http != "off":
            self._show(f"status on http://{http}/status".encode())
        if self._viewer.command and self._output.interactive:
            self._start(self._viewer)

    def _tell_daemon(self, event: dict[str, Any]) -> None:
        if self._daemon.link is not None:
            self._send(self._daemon.link, event)

    def _send(self, daemon: socket.socket, message: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
        try:
            link.send(daemon, message, descriptors)
        except OSError as error:
            # Gone, or it does not read: its exit, or its next request, sorts it out.
            self._write_log(f"the daemon did not take a message ({error}): {message!r:.100}")

    # ------------------------------------------------------------ words

    def _show(self, line: bytes) -> None:
        """To the operator, unless the viewer draws; the log has its own account."""
        if not self._viewer.running:
            self._output.line(line)

    def _note(self, text: str) -> None:
        """Something that the operator should see, and the log should keep."""
        self._write_log(text)
        if not self._viewer.running:
            self._errors.line(text.encode())

    def _write_log(self, text: str) -> None:
        self._log.line(f"supervisor: {time.strftime('%Y-%m-%dT%H:%M:%S')} {text}".encode())

    # ------------------------------------------------------------ the end

    def _finish(self, code: int) -> None:
        if self._exit_code is None:
            self._exit_code = code

    def _stop_viewer(self) -> None:
        """Let it restore the terminal before anything else is written there."""
        self._viewer.signal(signal.SIGTERM)
        self._wait_for((self._viewer,), self._patience.viewer_s)
        self._viewer.kill_group()
        self._wait_for((self._viewer,), self._patience.viewer_s)

    def _end_children(self) -> None:
        self._stop_viewer()
        self._daemon.kill_group()
        for child in (self._engine, self._trainer):
            child.signal(signal.SIGTERM)
        self._wait_for(self._children, self._end_patience_s())
        for child in self._children:
            child.kill_group()
        self._wait_for(self._children, self._patience.reap_s)

    def _end_patience_s(self) -> float:
        if self._end_by_s is None:
            return self._patience.finish_s
        return max(self._patience.end_s, self._end_by_s - time.monotonic())

    def _wait_for(self, children: tuple[Child, ...], patience_s: float) -> None:
        """Turn the loop until these have ended; nobody is restarted meanwhile."""
        deadline_s = time.monotonic() + patience_s
        while any(child.running for child in children) and time.monotonic() < deadline_s:
            for child in children:
                if child.running and child.exited():
                    self._reap(child)
            if any(child.running for child in children):
                self._loop.turn(deadline_s)

    def _clean_up(self) -> None:
        for child in self._children:  # still there only after an error of ours
            child.kill_group()
        self._port.close()
        remove_live_files(self._home)
        self._log.close()


def _again(delay_s: float) -> str:
    return f"starting it again in {delay_s:.1f} s" if delay_s else "starting it again"
