"""One thread that waits for descriptors, signals and times. Callbacks are short and never block."""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any


class Loop:
    """A selector whose descriptors may be forgotten by any callback of the same turn."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._callbacks: dict[int, Callable[[], object]] = {}

    def watch(self, descriptor: int, callback: Callable[[], object]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ)
        self._callbacks[descriptor] = callback

    def forget(self, descriptor: int) -> None:
        """No error when it is not watched."""
        if self._callbacks.pop(descriptor, None) is not None:
            self._selector.unregister(descriptor)

    def turn(self, until_s: float | None) -> None:
        """Run what is ready; wait for it at most until the monotonic time `until_s`."""
        timeout_s = None if until_s is None else max(0.0, until_s - time.monotonic())
        for key, _ in self._selector.select(timeout_s):
            callback = self._callbacks.get(key.fd)
            if callback is not None:
                callback()

    @contextlib.contextmanager
    def signals(self, *numbers: signal.Signals, on_signal: Callable[[int], None]) -> Iterator[None]:
        """Signals become callbacks of a turn; one that was ignored at our start (nohup) stays ignored."""
        receiver, sender = socket.socketpair()
        receiver.setblocking(False)
        sender.setblocking(False)

        def read() -> None:
            with contextlib.suppress(BlockingIOError):
                for number in receiver.recv(4096):
                    on_signal(number)

        previous: dict[signal.Signals, Any] = {}
        for number in numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                previous[number] = signal.signal(number, lambda *_: None)
        previous_fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        self.watch(receiver.fileno(), read)
        # Whoever became this process may have held them back until somebody here would hear them.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
        try:
            yield
        finally:
            signal.set_wakeup_fd(previous_fd)
            for number, handler in previous.items():
                signal.signal(number, handler)
            self.forget(receiver.fileno())
            receiver.close()
            sender.close()

    def close(self) -> None:
        self._selector.close()
