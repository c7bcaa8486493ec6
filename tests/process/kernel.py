"""A real notebook kernel for tests: cells go in, what a front end would show comes out.

::

    with Notebook(tmp_path) as notebook:
        notebook.run("%load_ext taas_magic")
        cell = notebook.start("#pragma taas --gpus 2\\n...")
        notebook.wait_for_output("epoch 1")
        notebook.interrupt()
        assert notebook.wait().error_name == "KeyboardInterrupt"
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from process.watch import await_condition, titled

import taas_magic

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
#: How often a wait looks whether the kernel is still there.
_LOOK_S = 0.2


class KernelGoneError(Exception):
    """The kernel's process ended while a cell was waited for."""


@dataclass
class CellResult:
    """What a cell showed, so far or in the end; text is free of colour codes.

    Attributes:
        status: "running", then "ok", "error" or "aborted".
        displays: The MIME bundles that were displayed; an update replaces the one it updates.
        result: The text of the last expression's value (``Out[n]``); None where there is none.
        result_data: Its MIME bundle.
        error_name: The exception's class, "" where there is none.
        error_value: Its text.
        traceback_text: All that the front end shows of it.
        execution_count: The number in front of the cell; 0 until the kernel has said it.
        seconds: From the request to the end.
    """

    status: str = "running"
    stdout: str = ""
    stderr: str = ""
    displays: list[dict[str, Any]] = field(default_factory=list)
    result: str | None = None
    result_data: dict[str, Any] = field(default_factory=dict)
    error_name: str = ""
    error_value: str = ""
    traceback_text: str = ""
    execution_count: int = 0
    seconds: float = 0.0

    @property
    def output(self) -> str:
        """Both streams, the error and the result: for a look whether something is said anywhere."""
        return "\n".join([self.stdout, self.stderr, self.traceback_text, self.result or ""])

    def ok(self) -> Self:
        """Itself; fails the test where the cell did not end well."""
        assert self.status == "ok", f"the cell ended with {self.status}\n{self.output}"
        return self


class Notebook:
    """A kernel of this interpreter in a process of its own.

    Args:
        directory: The kernel's working directory.
        environment: Set on top of this process's environment.
        extension: Load ``taas_magic`` at the start.
        allow_stdin: Offer ``input()`` to cells; see ``answers`` of :meth:`start`.
    """

    def __init__(
        self,
        directory: Path,
        environment: Mapping[str, str] | None = None,
        *,
        extension: bool = False,
        allow_stdin: bool = False,
    ) -> None:
        self.directory = directory
        self._environment = dict(environment or {})
        self._extension = extension
        self._allow_stdin = allow_stdin
        self._answers: list[str] = []
        self._display_ids: dict[str, int] = {}
        self._message_id = ""
        self._is_idle = True
        self._started_at = 0.0
        self._cell = CellResult(status="ok")
        self._private: Path | None = None

    # -- the kernel's life ---------------------------------------------------------------------------------------

    def open(self) -> Self:
        """Start the kernel and wait until it answers."""
        # Of its own, and short: sockets lie in it, and their paths have a limit.
        self._private = Path(tempfile.mkdtemp(prefix="nb-"))
        self.manager = KernelManager(
            transport="ipc", ip=str(self._private / "k"), connection_file=str(self._private / "kernel.json")
        )
        self.manager.start_kernel(cwd=str(self.directory), env=self._kernel_environment())
        try:
            self._connect()
            if self._extension:
                self.run("%load_ext taas_magic").ok()
        except BaseException:
            self.close(now=True)
            raise
        return self

    def _kernel_environment(self) -> dict[str, str]:
        # The kernel is to import the package that is under test here, whatever else is installed.
        package = str(Path(taas_magic.__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
        private = {"IPYTHONDIR": str(self._private), "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        return {**os.environ, **private, **self._environment}

    def _connect(self) -> None:
        client = self.manager.client()
        assert isinstance(client, BlockingKernelClient)
        self.client = client
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def restart(self) -> None:
        """Restart the kernel as the front end's button does."""
        self.client.stop_channels()
        self.manager.restart_kernel()
        self._is_idle = True
        if self._cell.status == "running":
            self._cell.status = "aborted"
        self._connect()

    def close(self, *, now: bool = False) -> None:
        """End the kernel; ``now`` kills it."""
        if self._private is None:
            return
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=now or not self.is_alive)
        self.manager.cleanup_resources()
        shutil.rmtree(self._private, ignore_errors=True)
        self._private = None

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(now=kind is not None)

    @property
    def is_alive(self) -> bool:
        """Whether the kernel's process is there."""
        return bool(self.manager.is_alive())

    @property
    def pid(self) -> int:
        """The kernel's process."""
        provisioner: Any = self.manager.provisioner
        return int(provisioner.pid)

    # -- cells ---------------------------------------------------------------------------------------------------

    def run(self, source: str, timeout: float = 60.0, *, answers: Sequence[str] = ()) -> CellResult:
        """Run a cell to its end; see :meth:`start` and :meth:`wait`."""
        self.start(source, answers=answers)
        return self.wait(timeout)

    def start(self, source: str, *, answers: Sequence[str] = ()) -> CellResult:
        """Submit a cell and return at once; its result fills up during the waits.

        Args:
            source: The cell's text.
            answers: What to type when the cell asks, in order.
        """
        assert self._cell.status != "running", "the cell before this one is still running"
        self._answers = list(answers)
        self._display_ids = {}
        self._is_idle = False
        self._cell = CellResult()
        self._started_at = time.monotonic()
        self._message_id = self.client.execute(source, allow_stdin=self._allow_stdin or bool(answers))
        return self._cell

    def interrupt(self) -> None:
        """Press Stop."""
        self.manager.interrupt_kernel()

    def wait(self, timeout: float = 60.0) -> CellResult:
        """Wait for the end of the cell.

        Raises:
            TimeoutError: if it does not come in time; the cell is still running then.
            KernelGoneError: if the kernel's process ends.
        """
        deadline = time.monotonic() + timeout
        while not (self._is_idle and self._take_reply()):
            self._pump(deadline, "the end of the cell")
        self._cell.seconds = time.monotonic() - self._started_at
        return self._cell

    def wait_for_output(self, text: str, timeout: float = 30.0) -> CellResult:
        """Wait until the running cell has written ``text``.

        Raises:
            TimeoutError: if it does not come in time, or the cell ends before.
            KernelGoneError: if the kernel's process ends.
        """
        deadline = time.monotonic() + timeout
        while text not in self._cell.stdout and text not in self._cell.stderr:
            if self._is_idle:
                self.wait()
                raise TimeoutError(f"the cell ended without writing {text!r}:\n{self._cell.output}")
            self._pump(deadline, repr(text))
        return self._cell

    def await_preloaded(self, timeout: float = 60.0) -> None:
        """Wait until the runner has a zygote with the notebook's imports, so that a leak check need not see it come."""
        await_condition(lambda: bool(titled(self.pid, "taas: zygote (preloaded)")), "a preloaded zygote", timeout)

    # -- messages ------------------------------------------------------------------------------------------------

    def _pump(self, deadline: float, awaited: str) -> None:
        """Take one message of the cell, if one comes soon."""
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited for {awaited}; so far there is:\n{self._cell.output}")
        self._answer_question()
        try:
            message = self.client.get_iopub_msg(timeout=_LOOK_S)
        except queue.Empty:
            if not self.is_alive:
                self._cell.status = "aborted"
                raise KernelGoneError(f"the kernel ended; until then there was:\n{self._cell.output}") from None
            return
        if message["parent_header"].get("msg_id") == self._message_id:
            self._show(message["header"]["msg_type"], message["content"])

    def _take_reply(self) -> bool:
        try:
            reply = self.client.get_shell_msg(timeout=_LOOK_S)
        except queue.Empty:
            return False
        if reply["parent_header"].get("msg_id") != self._message_id:
            return False
        self._cell.status = reply["content"]["status"]
        self._cell.execution_count = reply["content"].get("execution_count", 0)
        return True

    def _answer_question(self) -> None:
        if self._answers and self.client.stdin_channel.msg_ready():
            self.client.get_stdin_msg(timeout=_LOOK_S)
            self.client.input(self._answers.pop(0))

    def _show(self, kind: str, content: dict[str, Any]) -> None:
        cell = self._cell
        if kind == "status":
            self._is_idle = content["execution_state"] == "idle"
        elif kind == "stream" and content["name"] == "stdout":
            cell.stdout += _ANSI.sub("", content["text"])
        elif kind == "stream":
            cell.stderr += _ANSI.sub("", content["text"])
        elif kind == "execute_result":
            cell.result_data, cell.result = content["data"], content["data"].get("text/plain")
        elif kind in ("display_data", "update_display_data"):
            self._display(content)
        elif kind == "clear_output":
            cell.stdout, cell.stderr, cell.displays = "", "", []
            self._display_ids = {}
        elif kind == "error":
            cell.error_name, cell.error_value = content["ename"], content["evalue"]
            cell.traceback_text = _ANSI.sub("", "\n".join(content["traceback"]))

    def _display(self, content: dict[str, Any]) -> None:
        name = content.get("transient", {}).get("display_id")
        if name is not None and name in self._display_ids:
            self._cell.displays[self._display_ids[name]] = content["data"]
            return
        if name is not None:
            self._display_ids[name] = len(self._cell.displays)
        self._cell.displays.append(content["data"])


@contextlib.contextmanager
def warm_notebook(directory: Path, environment: Mapping[str, str] | None = None) -> Iterator[Notebook]:
    """A notebook whose runner and zygote are warm: what a leak check around a cell finds is then that cell's."""
    with Notebook(directory, environment, extension=True) as notebook:
        notebook.run("#pragma taas --gpus 1\npass", timeout=120).ok()
        yield notebook


def ranks(notebook: Notebook, source: str, num_ranks: int = 2, flags: str = "") -> CellResult:
    """Run a cell on ranks."""
    return notebook.run(f"#pragma taas --gpus {num_ranks} {flags}\n{source}")


def value(notebook: Notebook, expression: str) -> str:
    """What the notebook shows of an expression."""
    result = notebook.run(expression).ok().result
    assert result is not None
    return result
