"""The IPython shell in which a rank runs the cell: magics, ``await``, ``display`` and figures work as in a kernel.

It is made once, in the zygote, and inherited by every rank. Its namespace is ``__main__``. It never marks the
interpreter as interactive (``sys.ps1``): Lightning and others refuse to train in interactive processes, which ranks are
not.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import sys
import traceback
import types
import warnings
from collections.abc import Callable
from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
from traitlets import Type
from traitlets.config import Config

from taas_magic.namespace.pack import cache_sources
from taas_magic.rank import output
from taas_magic.wire import DisplayKind

#: Sends something to display to the runner: kind ("display", "update", "clear", "result") and JSON content.
SendDisplay = Callable[[DisplayKind, bytes], None]
#: Asks the user for a line: prompt, whether it is a password.
AskUser = Callable[[str, bool], str]


class RankShell(InteractiveShell):
    """An interactive shell without a terminal, a history or a front end of its own."""

    display_pub_class = Type("taas_magic.rank.shell.RankDisplayPublisher")  # type: ignore[assignment]
    displayhook_class = Type("taas_magic.rank.shell.RankDisplayHook")  # type: ignore[assignment]

    send_display: SendDisplay
    #: What is being run; the display hook looks whether it ends with a semicolon.
    current_source: str

    def init_prompts(self) -> None:
        """Leave ``sys.ps1`` alone, unlike the base class."""

    def init_history(self) -> None:
        """Keep no history, and so start no thread that saves one."""
        super().init_history()  # type: ignore[no-untyped-call, unused-ignore]
        self.history_manager.enabled = False  # type: ignore[union-attr]

    def init_io(self) -> None:
        """Ranks write to their own descriptors."""

    def showtraceback(self, *args: Any, exception_only: bool = False, **kwargs: Any) -> None:
        """Show nothing: the kernel shows the failure of the run, once."""
        if exception_only:
            # The cell has ended with SystemExit. How to leave IPython is explained by the kernel, once.
            warnings.filterwarnings("ignore", message="To exit: use")

    def showsyntaxerror(self, *args: Any, **kwargs: Any) -> None:
        """Show nothing; see :meth:`showtraceback`."""

    def ask_exit(self) -> None:
        """End the cell: what ``exit()`` and ``quit()`` call."""
        raise SystemExit

    def run_source(self, source: str, execution_count: int) -> ExecutionResult:
        """Run a cell; tracebacks call it by the number it has in the notebook."""
        self.execution_count = execution_count
        result: ExecutionResult = self.run_cell(source, store_history=False, silent=False)  # type: ignore[no-untyped-call, unused-ignore]
        return result

    def run_empty_cell(self) -> None:
        """Run a cell that leaves nothing behind, for what running one touches."""
        self.run_source("None", 1)

    def structured_traceback(self, error: BaseException) -> list[str]:
        """Format an exception as a notebook shows it, starting in the cell's own code."""
        tb_offset = 0 if isinstance(error, SyntaxError) else 1
        kind = type(error)
        if isinstance(error, SyntaxError):
            lines: list[str] = self.SyntaxTB.structured_traceback(kind, error, [])  # type: ignore[arg-type, unused-ignore]
        elif isinstance(error, BaseExceptionGroup):
            # IPython's own formatters leave out what is in the group.
            frames = error.__traceback__ and error.__traceback__.tb_next
            lines = "".join(traceback.format_exception(kind, error, frames)).splitlines()
        else:
            lines = self.InteractiveTB.structured_traceback(kind, error, error.__traceback__, tb_offset=tb_offset)
        return lines


class RankDisplayPublisher(DisplayPublisher):
    """Sends what is displayed to the runner."""

    def publish(self, data: Any, metadata: Any = None, source: Any = None, **options: Any) -> None:
        """See the base class; ``transient`` and ``update`` are honoured."""
        content = {"data": data, "metadata": metadata or {}, "transient": options.get("transient") or {}}
        _send(self.shell, "update" if options.get("update") else "display", content)

    def clear_output(self, wait: bool = False) -> None:
        """See the base class."""
        _send(self.shell, "clear", {"wait": wait})


class RankDisplayHook(DisplayHook):
    """Keeps the value of the last expression and sends its representation."""

    result: Any = None
    has_result = False
    #: Whether the value is shown here; the kernel shows it where it gathers the values of all ranks.
    is_shown = True

    def quiet(self) -> bool:
        """Whether the cell ended with a semicolon; the base class would look in the history."""
        shell: Any = self.shell
        ends: bool = self.semicolon_at_end_of_expression(shell.current_source)  # type: ignore[no-untyped-call, unused-ignore]
        return ends

    def __call__(self, result: Any = None) -> None:
        """Take the value of the last expression."""
        if result is None:
            return
        self.result, self.has_result = result, True
        if self.quiet() or not self.is_shown:
            return
        data, metadata = self.compute_format_data(result)  # type: ignore[no-untyped-call, unused-ignore]
        if data:
            _send(self.shell, "result", {"data": data, "metadata": metadata})


def _send(shell: Any, kind: DisplayKind, content: dict[str, Any]) -> None:
    output.flush_python()
    shell.send_display(kind, json.dumps(content, default=_jsonable).encode())


def _jsonable(value: Any) -> Any:
    if isinstance(value, bytes):
        import base64

        return base64.b64encode(value).decode("ascii")
    return repr(value)


def prepare_shell() -> RankShell:
    """Make the shell, and ``__main__`` with it."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    excepthook, display = sys.excepthook, sys.displayhook
    config = Config({"HistoryManager": {"enabled": False, "hist_file": ":memory:"}})
    shell = RankShell.instance(config=config, user_module=main, user_ns=main.__dict__)
    shell.current_source = ""
    sys.modules["__main__"] = main
    sys.excepthook, sys.displayhook = excepthook, display
    for name in ("ps1", "ps2", "ps3"):
        if hasattr(sys, name):
            delattr(sys, name)
    _format_a_traceback(shell)
    # A first cell imports and compiles what every later one uses: ten milliseconds, which no rank has to spend then.
    shell.run_empty_cell()
    return shell


def _format_a_traceback(shell: RankShell) -> None:
    """Have all imported that tracebacks need, a tenth of a second of work that a failing rank then need not do."""

    def fail() -> None:
        raise LookupError

    try:
        fail()
    except LookupError as error:
        shell.structured_traceback(error)


def set_style(shell: RankShell, *, colors: str, traceback_mode: str) -> None:
    """Have tracebacks look like the notebook's."""
    with contextlib.suppress(Exception):
        shell.colors = colors
    with contextlib.suppress(Exception):
        shell.InteractiveTB.set_mode(mode=traceback_mode)


def configure(shell: RankShell, *, send_display: SendDisplay, ask: AskUser) -> None:
    """Give the inherited shell what this rank needs."""
    shell.send_display = send_display
    shell.current_source = ""
    builtins.input = lambda prompt="": ask(str(prompt), False)
    import getpass

    getpass.getpass = lambda prompt="Password: ", stream=None: ask(str(prompt), True)


def add_sources(shell: RankShell, sources: dict[str, tuple[str, int | None]]) -> None:
    """Let tracebacks and ``inspect.getsource`` find the text of the notebook's earlier cells."""
    cache_sources(sources)
    for name, (_, number) in sources.items():
        if number is not None:
            shell.compile._filename_map[name] = number
