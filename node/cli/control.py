"""Talks to the live daemon of a home over its control socket; the standard library's client starts fastest."""

from __future__ import annotations

import http.client
import json
import socket
import time
from typing import Any, TypeVar

import msgspec

from node.errors import OperatorError
from node.home import Home
from node.status import ExportPoint, Peers, Status
from node.supervisor import lock

ANSWER_S = 10.0
STARTING_S = 6.0
"""A daemon that has just been started opens its control socket within this time."""

StructT = TypeVar("StructT", bound=msgspec.Struct)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path
        self._timeout_s = timeout_s

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self._timeout_s)
        self.sock.connect(self._path)


class Control:
    """Raises `OperatorError` from every method when no daemon runs on the home."""

    def __init__(self, home: Home) -> None:
        self._home = home

    def status(self) -> Status:
        return self._get("/status", Status)

    def status_now(self) -> Status | None:
        """None when no daemon answers at this moment."""
        try:
            return msgspec.json.decode(self._request("GET", "/status", ANSWER_S), type=Status)
        except (OSError, http.client.HTTPException, OperatorError, msgspec.DecodeError):
            return None

    def peers(self) -> Peers:
        return self._get("/peers", Peers)

    def stop(self) -> None:
        self.request("POST", "/stop")

    def export_point(self) -> ExportPoint:
        return msgspec.json.decode(self.request("POST", "/export", answer_s=600.0), type=ExportPoint)

    def request(self, method: str, path: str, *, answer_s: float = ANSWER_S) -> bytes:
        """The body of the answer. Waits for a daemon that is just starting."""
        deadline_s = time.monotonic() + STARTING_S
        while True:
            try:
                return self._request(method, path, answer_s)
            except (FileNotFoundError, ConnectionRefusedError):
                if lock.holder(self._home) is None:
                    raise self._nobody() from None
                if time.monotonic() > deadline_s:
                    raise OperatorError(
                        f"the daemon of {self._home.path} has not opened its control socket; see {self._home.log_file}"
                    ) from None
                # Nothing announces a socket that is about to appear.
                time.sleep(0.05)
            except TimeoutError:
                raise OperatorError(
                    f"the daemon of {self._home.path} did not answer within {answer_s:.0f} s; see {self._home.log_file}"
                ) from None
            except (OSError, http.client.HTTPException) as error:
                if lock.holder(self._home) is None:
                    raise self._nobody() from None
                raise OperatorError(
                    f"the daemon of {self._home.path} gave no answer ({error or type(error).__name__}); try again"
                ) from None

    def _get(self, path: str, kind: type[StructT]) -> StructT:
        return msgspec.json.decode(self.request("GET", path), type=kind)

    def _request(self, method: str, path: str, answer_s: float) -> bytes:
        connection = _UnixConnection(str(self._home.live_socket("control_socket")), answer_s)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            body = response.read()
        finally:
            connection.close()
        if response.status == 409:
            answer: dict[str, Any] = json.loads(body)
            raise OperatorError(str(answer["error"]))
        if response.status != 200:
            raise OperatorError(
                f"the daemon of {self._home.path} answered {method} {path} with {response.status}; see "
                f"{self._home.log_file}"
            )
        return body

    def _nobody(self) -> OperatorError:
        return OperatorError(f"no daemon runs on the home {self._home.path}: start one by `atoll daemon`")
