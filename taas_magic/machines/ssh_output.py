"""What a process on a machine writes: its answer, found among what a login prints, and its log."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import threading
from collections import deque
from collections.abc import Mapping
from typing import IO, Any

_LOG_LINES = 1000
_LOG_LINE_CHARS = 4000
#: What has no line's end by then is a line.
_LINE_BYTES = 1024 * 1024
_READ_BYTES = 65536  # as much as a pipe holds


class Output:
    """The lines of a process, and the answer among them. One thread feeds it, others look.

    The answer is the first line of stdout that holds an object of JSON with the order's ``marker``.

    Attributes:
        answer: The answer without the marker, once it has come.
        settled: Set when the answer has come, and when nothing will come any more.
    """

    def __init__(self, order: Mapping[str, Any]) -> None:
        self._order = json.loads(json.dumps(order))
        self._lock = threading.Lock()
        self._lines: deque[str] = deque(maxlen=_LOG_LINES)
        self._errors: deque[str] = deque(maxlen=_LOG_LINES)
        self._partial = {"stdout": b"", "stderr": b""}
        self.answer: dict[str, Any] | None = None
        self.settled = threading.Event()

    def feed(self, stream: str, data: bytes) -> None:
        """Take what was read from ``stdout`` or ``stderr``."""
        *lines, rest = (self._partial[stream] + data).split(b"\n")
        if len(rest) > _LINE_BYTES:
            lines, rest = [*lines, rest], b""
        self._partial[stream] = rest
        with self._lock:
            for line in lines:
                self._take(stream, line.decode(errors="replace"))

    def end(self) -> None:
        """Nothing will come any more."""
        for stream in self._partial:
            self.feed(stream, b"\n")
        self.settled.set()

    def tail(self, num_lines: int) -> list[str]:
        """The last lines of both streams, as they came; the answer is not among them."""
        with self._lock:
            return list(self._lines)[-num_lines:]

    def errors(self) -> list[str]:
        """The lines of stderr: ssh's own, and the process's."""
        with self._lock:
            return list(self._errors)

    def _take(self, stream: str, line: str) -> None:
        if self.answer is None and stream == "stdout" and (found := self._answer_in(line)):
            line, self.answer = found
            self.settled.set()
        if line := line.rstrip()[:_LOG_LINE_CHARS]:
            self._lines.append(line)
            if stream == "stderr":
                self._errors.append(line)

    def _answer_in(self, line: str) -> tuple[str, dict[str, Any]] | None:
        """What stands before the answer in its line (a greeting may have no line's end), and the answer."""
        if self._order["marker"] not in line:
            return None
        for brace in re.finditer("{", line):
            with contextlib.suppress(ValueError):
                found, _ = json.JSONDecoder().raw_decode(line, brace.start())
                # A login may echo what it reads: that is the order.
                if found.get("marker") == self._order["marker"] and found != self._order:
                    del found["marker"]
                    return line[: brace.start()], found
        return None


def read_all(process_fd: int, streams: Mapping[str, IO[bytes]], output: Output) -> None:
    """Read what a process writes, until it has ended; the body of a thread.

    Args:
        process_fd: A pidfd. It is closed at the end.
        streams: Its ``stdout`` and ``stderr``. They are closed at the end.
        output: What is fed.
    """
    names = {stream.fileno(): name for name, stream in streams.items()}
    poller = select.poll()
    poller.register(process_fd, select.POLLIN)
    for fd in names:
        os.set_blocking(fd, False)
        poller.register(fd, select.POLLIN)
    try:
        while process_fd not in (ready := [fd for fd, _ in poller.poll()]):
            for fd in ready:
                if not _read_some(fd, names[fd], output):
                    poller.unregister(fd)
        # What is there, and not until the streams end: others that the process has started may hold and use them.
        for fd, name in names.items():
            _read_some(fd, name, output)
    finally:
        output.end()
        os.close(process_fd)
        for stream in streams.values():
            stream.close()


def _read_some(fd: int, name: str, output: Output) -> bool:
    """Read what is there, and say whether more may come."""
    try:
        data = os.read(fd, _READ_BYTES)
    except BlockingIOError:
        return True
    output.feed(name, data)
    return bool(data)
