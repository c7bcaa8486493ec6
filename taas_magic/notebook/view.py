"""Shows a run in the cell's output, as if the kernel had produced it."""

from __future__ import annotations

import base64
import contextlib
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, TextIO

from IPython.core.interactiveshell import InteractiveShell

from taas_magic.notebook.lines import LineOrder, Text

#: How many flushes may come in a row, and how many a second on average.
_FLUSH_BURST, _FLUSHES_PER_S = 100.0, 50.0


class NotebookView:
    """Implements :class:`taas_magic.client.run.View` on an IPython shell.

    Rank 0's output is shown as it is; other ranks' lines carry their rank.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        #: (rank, stream) that wrote last, and whether it left its line unfinished.
        self._last: tuple[int, str] = (0, "stdout")
        self._is_mid_line = False
        self._order = LineOrder()
        #: The line of progress that is shown.
        self._progress = ""
        self._starts_line: dict[tuple[int, str], bool] = {}
        self._flushes_left, self._counted_at = _FLUSH_BURST, time.monotonic()

    def write(self, rank: int, stream: str, text: str) -> None:
        """See the protocol."""
        if text:
            self._write_all(self._order.put(Text(rank, stream, text), time.monotonic()))

    def tick(self) -> None:
        """See the protocol."""
        self._write_all(self._order.tick(time.monotonic()))

    def finish(self) -> None:
        """See the protocol."""
        self._write_all(self._order.end())

    def _write_all(self, texts: Iterable[Text]) -> None:
        for piece in texts:
            self._write_now(piece.rank, piece.stream, piece.text)

    def _write_now(self, rank: int, stream: str, text: str) -> None:
        target, last_target = _stream(stream), _stream(self._last[1])
        if rank != self._last[0] and self._is_mid_line:
            # Otherwise two ranks would share a line, and a progress bar would be continued by somebody else.
            last_target.write("\n")
        if target is not last_target:
            self._flush(last_target)
        self._last = (rank, stream)
        self._is_mid_line = not text.endswith("\n")
        target.write(text if rank == 0 else self._marked(rank, stream, text))
        self._flush(target)

    def _flush(self, target: TextIO) -> None:
        """Have the front end get what was written, at once where that is not too often.

        A kernel's stream sends a message a flush, and ZeroMQ drops messages that a front end is too slow to take.
        """
        now = time.monotonic()
        self._flushes_left = min(_FLUSH_BURST, self._flushes_left + (now - self._counted_at) * _FLUSHES_PER_S)
        self._counted_at = now
        if self._flushes_left >= 1 or not hasattr(target, "flush_interval"):
            self._flushes_left -= 1
            target.flush()
        # Otherwise ipykernel flushes by itself, `flush_interval` after the first write.

    def _marked(self, rank: int, stream: str, text: str) -> str:
        """The text with its rank at the start of each line; a carriage return starts one too."""
        mark = f"[rank {rank}] "
        key = (rank, stream)
        parts = []
        starts_line = self._starts_line.get(key, True)
        for line in text.splitlines(keepends=True):
            body = line.lstrip("\r")
            parts.append(line[: len(line) - len(body)])
            if body:
                parts.append(mark + body if starts_line or len(body) < len(line) else body)
            starts_line = line.endswith(("\n", "\r"))
        self._starts_line[key] = starts_line
        return "".join(parts)

    def display(self, rank: int, kind: str, content: dict[str, Any]) -> None:
        """See the protocol."""
        self.finish()
        if kind == "clear":
            self._shell.display_pub.clear_output(wait=content["wait"])
        elif kind == "comm":
            self._send_comm(content)
        elif kind == "result" and rank == 0:
            self._show_result(content["data"], content["metadata"])
        else:
            if rank != 0:
                self._write_now(rank, "stdout", f"shows a {_kind_of(content['data'])}:\n")
            self._shell.display_pub.publish(
                data=content["data"],
                metadata=content["metadata"],
                transient=content.get("transient") or {},
                update=kind == "update",
            )

    def _show_result(self, data: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Show the last expression's value as the cell's own; its formats were made where the value was."""
        hook = self._shell.displayhook
        hook.start_displayhook()
        hook.write_output_prompt()
        hook.write_format_data(data, metadata)
        hook.finish_displayhook()

    def _send_comm(self, content: dict[str, Any]) -> None:
        """Hand a widget's message on to the front end; elsewhere than in Jupyter there is none that knows widgets."""
        kernel = getattr(self._shell, "kernel", None)
        if kernel is None:
            return
        kernel.session.send(
            kernel.iopub_socket,
            content["msg_type"],
            content["content"],
            metadata=content["metadata"],
            parent=kernel.get_parent(),
            ident=f"comm-{content['content']['comm_id']}".encode(),
            buffers=[base64.b64decode(buffer) for buffer in content["buffers"]],
        )

    def show_value(self, value: Any) -> None:
        """Show a value as the cell's own, and make it the notebook's ``_``."""
        self._shell.displayhook(value)

    def keep_result(self, value: Any) -> None:
        """Make a value the notebook's ``_``."""
        with contextlib.suppress(Exception):
            self._shell.displayhook.update_user_ns(value)

    def notice(self, text: str) -> None:
        """See the protocol."""
        lines = "taas: " + "\n      ".join(text.splitlines())
        self.finish()
        self._write_now(0, "stderr", ("\n" if self._is_mid_line else "") + lines + "\n")

    def progress(self, text: str) -> None:
        """See the protocol."""
        if not text:
            if self._progress:
                self._progress = ""
                self._write_now(0, "stderr", "\n")
            return
        self.finish()
        # Spaces over what was longer before.
        line = f"\rtaas: {text}".ljust(len(self._progress))
        self._write_now(0, "stderr", line if self._progress else ("\n" if self._is_mid_line else "") + line)
        self._progress = line

    def ask(self, prompt: str, *, password: bool) -> str | None:
        """See the protocol."""
        kernel = getattr(self._shell, "kernel", None)
        ask: Callable[[str], str]
        if kernel is not None:
            ask = kernel.getpass if password else kernel.raw_input
        else:
            import getpass

            ask = getpass.getpass if password else input
        try:
            return ask(prompt)
        except Exception:  # noqa: BLE001 - a front end must not end a run
            return None


def _stream(name: str) -> TextIO:
    return sys.stdout if name == "stdout" else sys.stderr


def _kind_of(data: dict[str, Any]) -> str:
    rich = [kind for kind in data if kind != "text/plain"]
    return rich[0] if rich else "text/plain"
