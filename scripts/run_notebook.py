"""Run a notebook from end to end in the terminal: each cell's source, and its output as it comes.

Usage: ``python scripts/run_notebook.py NOTEBOOK.ipynb [--timeout SECONDS]``

The kernel is this very Python, whatever kernels are installed for the user. The exit status is 1 as soon as a cell
fails, and the notebook's file is not changed.
"""

from __future__ import annotations

import argparse
import os
import re
import struct
import subprocess
import sys
import tempfile
import time
from base64 import b64decode
from pathlib import Path
from typing import Any, TextIO

import nbformat
from jupyter_client.kernelspec import NATIVE_KERNEL_NAME, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager, KernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

#: Lines of a cell's source that are shown; the rest is counted.
SOURCE_LINES = 24
#: What colours a traceback, and means nothing in a file.
STYLES = re.compile(r"\x1b\[[\d;]*m")


class Screen:
    r"""Writes for a person: colours on a terminal only, and no lines that a ``\r`` has overwritten in a file."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._has_colour = self._is_terminal and "NO_COLOR" not in os.environ
        self._open_line = ""  # what a file's current line holds so far

    def raw(self, text: str) -> None:
        """Write a cell's output as it comes."""
        if self._is_terminal:
            self._stream.write(text)
            self._open_line = text.rpartition("\n")[2] or ("" if "\n" in text else self._open_line)
        else:
            *complete, self._open_line = (self._open_line + STYLES.sub("", text)).split("\n")
            self._stream.writelines(f"{_what_stays(line)}\n" for line in complete)
        self._stream.flush()

    def line(self, text: str = "", *, style: str = "") -> None:
        """Write whole lines of our own, below whatever a cell left open."""
        self.end_line()
        if not self._has_colour:
            text = STYLES.sub("", text)
        self._stream.write(f"\x1b[{style}m{text}\x1b[0m\n" if style and self._has_colour else f"{text}\n")
        self._stream.flush()

    def end_line(self) -> None:
        """Bring a line that a cell left open to its end."""
        if self._open_line:
            self._stream.write("\n" if self._is_terminal else f"{_what_stays(self._open_line)}\n")
            self._open_line = ""


def _what_stays(line: str) -> str:
    """The part of a line that a terminal would show after its carriage returns."""
    return line.rstrip("\r").rpartition("\r")[2]


class TerminalClient(NotebookClient):
    """An nbclient that shows what happens while it happens, and whose kernel is this Python.

    The kernel is reached through sockets in ``scratch``, a directory of the caller's.
    """

    def __init__(self, notebook: NotebookNode, screen: Screen, scratch: Path, **options: Any) -> None:
        super().__init__(notebook, **options)
        self._screen = screen
        self._scratch = scratch
        self._started = 0.0
        self._code_cells = 0
        self.on_cell_start = self._show_head
        self.on_cell_executed = self._show_time

    def create_kernel_manager(self) -> KernelManager:
        """A manager for the kernel that runs in this interpreter's environment."""
        self.km = AsyncKernelManager(
            kernel_name=NATIVE_KERNEL_NAME,
            # With no directories to look in, what remains is the kernel of the interpreter that runs this.
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
            connection_file=str(self._scratch / "kernel.json"),
            transport="ipc",
        )
        return self.km

    def output(
        self, outs: list[NotebookNode], msg: dict[str, Any], display_id: str | None, cell_index: int
    ) -> NotebookNode | None:
        """Take an output into the notebook, as nbclient does, and show it."""
        self._show_output(msg["msg_type"], msg["content"])
        return super().output(outs, msg, display_id, cell_index)

    def _show_head(self, cell: NotebookNode, cell_index: int) -> None:
        del cell_index
        self._started = time.monotonic()
        self._screen.line()
        if cell.cell_type == "markdown":
            self._screen.line(cell.source, style="1")
        elif cell.cell_type == "code":
            self._code_cells += 1
            lines = cell.source.splitlines()
            self._screen.line(f"In [{self._code_cells}]", style="32")
            for line in lines[:SOURCE_LINES]:
                self._screen.line(f"    {line}", style="2")
            if len(lines) > SOURCE_LINES:
                self._screen.line(f"    ... {len(lines) - SOURCE_LINES} more lines", style="2")

    def _show_output(self, kind: str, content: dict[str, Any]) -> None:
        if kind == "stream":
            self._screen.raw(content["text"])
        elif kind in {"execute_result", "display_data"}:
            self._screen.line(as_text(content["data"]))
        elif kind == "error":
            self._screen.line("\n".join(content["traceback"]))

    def _show_time(self, cell: NotebookNode, cell_index: int, execute_reply: dict[str, Any]) -> None:
        del cell, cell_index, execute_reply
        self._screen.line(f"[{time.monotonic() - self._started:.1f} s]", style="2")


def as_text(data: dict[str, Any]) -> str:
    """A display's data, as a MIME bundle, in a form that a terminal can show."""
    if "image/png" in data:
        width, height = struct.unpack(">II", b64decode(data["image/png"])[16:24])  # the IHDR chunk of a PNG
        return f"[figure {width}x{height}]"
    return str(data.get("text/plain") or f"[{', '.join(data)}]")


def _count_gpus() -> int:
    """GPUs of this machine, as its driver lists them; 0 where there is no driver."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def main(arguments: list[str] | None = None) -> int:
    """Run the notebook that the arguments name; 0 if every cell succeeded."""
    parser = argparse.ArgumentParser(description="Run a notebook in the terminal.")
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--timeout", type=int, default=900, metavar="SECONDS", help="for one cell (default: 900)")
    options = parser.parse_args(arguments)
    if not options.notebook.is_file():
        parser.error(f"no notebook at {options.notebook}")
    # What cells start by name (`!python ...`) is this environment's; the debugger's notes on frozen modules are noise.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    screen = Screen(sys.stdout)
    if _count_gpus() == 1:
        screen.line("this machine has one GPU and the notebook wants two ranks: they rehearse on CPU", style="2")
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    started = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="nb-") as scratch:
            TerminalClient(
                nbformat.read(options.notebook, as_version=4),
                screen,
                Path(scratch),
                timeout=options.timeout,
                resources={"metadata": {"path": str(options.notebook.resolve().parent)}},
            ).execute()
    except CellExecutionError as error:
        screen.line(f"{options.notebook}: a cell failed: {error.ename}: {error.evalue}", style="31")
        return 1
    except CellTimeoutError:
        screen.line(f"{options.notebook}: a cell took longer than {options.timeout} s", style="31")
        return 1
    except DeadKernelError:
        screen.line(f"{options.notebook}: the kernel died", style="31")
        return 1
    screen.line()
    screen.line(f"{options.notebook}: all cells ran, {time.monotonic() - started:.0f} s", style="32")
    return 0


if __name__ == "__main__":
    sys.exit(main())
