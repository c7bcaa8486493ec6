"""The Stop button while a run is active: counted, never raised in the middle of something."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


class Interrupts:
    """How often the user has interrupted."""

    count = 0

    def on_signal(self, signum: int, frame: Any) -> None:
        """The handler of SIGINT."""
        self.count += 1


@contextlib.contextmanager
def counted_interrupts() -> Iterator[Interrupts]:
    """Count SIGINTs instead of raising KeyboardInterrupt, so that a message is never half handled.

    Only the main thread can set handlers; elsewhere (a kernel's subshell) interrupts do not come anyway.
    """
    interrupts = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    previous = signal.signal(signal.SIGINT, interrupts.on_signal)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, previous)
