"""Says how far a transfer is, where it takes long enough to wonder."""

from __future__ import annotations

import time
from collections.abc import Callable

from taas_magic.units import format_bytes

#: Nothing is said of what is over sooner.
_AFTER_S = 1.0
_EVERY_S = 0.2


class Progress:
    """One transfer.

    Args:
        show: Shows a text in place of the one before; "" ends the line.
        what: What is done, as "sending the cell's state".
        after_s: Say nothing sooner.
    """

    def __init__(self, show: Callable[[str], None], what: str, *, after_s: float = _AFTER_S) -> None:
        self._show = show
        self._what = what
        self._due_at = time.monotonic() + after_s
        self._is_shown = False

    def tell(self, done_bytes: int, total_bytes: int) -> None:
        """Note how far it is."""
        now = time.monotonic()
        if now >= self._due_at and total_bytes:
            self._due_at = now + _EVERY_S
            self._is_shown = True
            share = f"{100 * done_bytes // total_bytes} % of {format_bytes(total_bytes)}"
            self._show(f"{self._what}: {share}")

    def end(self) -> None:
        """Note that it is over."""
        if self._is_shown:
            self._is_shown = False
            self._show("")
