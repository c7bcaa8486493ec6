"""Loading and unloading: the input transformation that finds pragmas, the magics, the session."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from taas_magic.client.detached import find, require_alone
from taas_magic.client.pools import PoolSession, describe_pool, detachable
from taas_magic.client.session import Session
from taas_magic.errors import PragmaError, TaasError
from taas_magic.machines.keys import is_key
from taas_magic.notebook.cell import attach, rank_environment, require_kept, run_cell, run_cell_for_value
from taas_magic.notebook.imports import installed_modules
from taas_magic.notebook.magics import make_magics
from taas_magic.pools import LOCAL, find_pool
from taas_magic.pragma import ParsedCell, Pragma, parse_cell, parse_flags, parse_magic_cell, parse_plain_cell
from taas_magic.settings import PoolSettings, RunnerAddress, load_settings

#: The cell magics that a cell becomes that has a pragma, or that has none; not for users, whose magic is ``%%taas``.
_PRAGMA_MAGIC, _PLAIN_MAGIC = "taas_pragma_cell", "taas_plain_cell"


class Extension:
    """taas in one shell."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        #: The local place.
        self._local = Session()
        #: The places that cells have named, by their pools' names.
        self._pools: dict[str, PoolSession] = {}
        #: Where cells run that name no place.
        self._default_pool = PoolSettings(name=LOCAL)
        #: The place of the last cell; what is said of ranks that are kept is said of those there.
        self.session: Session = self._local
        self._is_transforming = True
        #: What plain cells are run with, on ranks; None where they are the kernel's.
        self._auto: Pragma | None = None
        #: What the runner was last told to preload.
        self._preloaded: tuple[list[str], dict[str, str]] | None = None
        self._replaced_magics: dict[tuple[str, str], Any] = {}

    def install(self) -> None:
        """Hook into the shell and start the runner in the background."""
        self.shell.input_transformers_cleanup.insert(0, self.transform)
        line, cell = make_magics(self)
        for kind, name, function in (
            ("line", "taas", line),
            ("cell", "taas", cell),
            ("cell", _PRAGMA_MAGIC, self.run_pragma_cell),
            ("cell", _PLAIN_MAGIC, self.run_plain_cell),
        ):
            table = self.shell.magics_manager.magics[kind]
            self._replaced_magics[kind, name] = table.get(name)
            self.shell.register_magic_function(function, kind, name)  # type: ignore[arg-type, unused-ignore]
        self.shell.events.register("post_run_cell", self.preload)
        self.shell.showtraceback = self.show_traceback  # type: ignore[method-assign, unused-ignore]
        self._local.warm_up()

    def remove(self) -> None:
        """Undo :meth:`install` and end the runner."""
        with contextlib.suppress(ValueError):
            self.shell.input_transformers_cleanup.remove(self.transform)
        with contextlib.suppress(ValueError):
            self.shell.events.unregister("post_run_cell", self.preload)
        with contextlib.suppress(AttributeError):
            del self.shell.showtraceback
        for (kind, name), previous in self._replaced_magics.items():
            table = self.shell.magics_manager.magics[kind]
            if previous is None:
                table.pop(name, None)
            else:
                table[name] = previous
        for session in (self._local, *self._pools.values()):
            session.close()

    # -- cells ---------------------------------------------------------------------------------------------------

    def transform(self, lines: list[str]) -> list[str]:
        """Turn a cell that has a pragma into a call of our magic; the text stays untouched inside.

        Errors are not raised here: IPython would show them with its own frames. The magic raises them.
        """
        if not self._is_transforming:
            return lines
        source = "".join(lines)
        if _has_pragma(source):
            return [_call_of(_PRAGMA_MAGIC, source)]
        if self._auto is not None and parse_plain_cell(self._auto, source) is not None:
            return [_call_of(_PLAIN_MAGIC, source)]
        return lines

    def run_pragma_cell(self, line: str, cell: str) -> None:
        """Run a cell whose head is a pragma."""
        with self.errors_without_frames():
            parsed = parse_cell(cell)
            if parsed is not None:
                self._run(parsed)

    def run_plain_cell(self, line: str, cell: str) -> None:
        """Run a cell without a pragma on ranks, as ``%taas auto`` has it."""
        with self.errors_without_frames():
            parsed = None if self._auto is None else parse_plain_cell(self._auto, cell)
            if parsed is not None:
                self._run(parsed)

    def run_plain_cells_with(self, flags: str | None) -> None:
        """Have plain cells run on ranks from here on, or, for None, in the kernel.

        Raises:
            PragmaError: if the flags are wrong.
        """
        self._auto = None if flags is None else parse_flags(flags)

    @property
    def plain_cells(self) -> Pragma | None:
        """What plain cells are run with; None where they are the kernel's."""
        return self._auto

    def run_magic_cell(self, line: str, cell: str) -> None:
        """Run the body of ``%%taas``."""
        with self.errors_without_frames():
            self._run(parse_magic_cell(line, cell))

    def _run(self, parsed: ParsedCell) -> None:
        if parsed.pragma.detach and not parsed.pragma.dry_run:
            self._run_detached(parsed)
            return
        self.session = self._session_for(parsed.pragma)
        run_cell(self.shell, self.session, parsed, self._plain_transform)

    def _run_detached(self, parsed: ParsedCell) -> None:
        """Run a cell in a session of its own, which is left to itself."""
        require_alone(self.session.kept)
        settings = load_settings(Path.cwd(), os.environ)
        pool = find_pool(settings, parsed.pragma.pool) if parsed.pragma.pool else self._default_pool
        session = PoolSession(detachable(pool), settings, self._local.store)
        try:
            run_cell(self.shell, session, parsed, self._plain_transform)
        finally:
            session.close()

    def attach(self, run_id: str, *, stops: bool = False) -> None:
        """Take a run up that goes on by itself; "" is the latest."""
        attach(self.shell, find(run_id), self._local.store, stops=stops)

    def _session_for(self, pragma: Pragma) -> Session:
        """Where a cell runs: in the pool that it names; else where ranks are kept, or on this machine.

        Raises:
            PlacementError: if there is no such pool.
            SettingsError: if the settings are not valid.
        """
        settings = load_settings(Path.cwd(), os.environ)
        if pragma.pool is None and self.session.kept is not None:
            return self.session
        pool = self._default_pool if pragma.pool is None else find_pool(settings, pragma.pool)
        if pool.engine == "local":
            return self._local
        session = self._pools.get(pool.name)
        if session is not None and session.pool != pool:
            session.close()
            session = None
        if session is None:
            session = self._pools[pool.name] = PoolSession(pool, settings, self._local.store)
        return session

    def connect(self, address: str, key: str) -> None:
        """Have cells that name no place run on the machine whose runner listens there; "" is this machine again.

        Raises:
            PragmaError: if that is no address, or no key.
        """
        if not address:
            self._default_pool = PoolSettings(name=LOCAL)
            return
        host = re.fullmatch(r"tcp://(\S+):\d+", address)
        if host is None or not is_key(key):
            raise PragmaError.of(
                f"%taas connect {address} {key}".rstrip(),
                expected="%taas connect tcp://HOST:PORT KEY, with the key that `taas keys --runner` shows there",
                do="start `taas runner` there; its log says both",
            )
        runner = RunnerAddress(host[1], address, key)
        self._default_pool = PoolSettings(name=host[1], engine="runner", runners=(runner,))

    def describe_pools(self) -> str:
        """The pools of the settings, a line each, with their machines as far as they are known."""
        settings = load_settings(Path.cwd(), os.environ)
        if not settings.pools:
            return "no pools: add [pools.NAME] to taas.toml; until then `#!NAME.8` means this machine"
        lines = []
        for name, pool in settings.pools.items():
            session = self._pools.get(name)
            lines.append(f"{name}: {describe_pool(pool, session.machines if session is not None else [])}")
        return "\n".join(lines)

    def pull(self, name: str, ranks: str) -> Any:
        """The value of an expression on kept ranks: one, or a list where several are asked for."""
        kept = require_kept(self.session, "pull from")
        flags = f"--gpus {kept.place.num_ranks} --rank {ranks} --rank-results"
        values = run_cell_for_value(self.shell, self.session, parse_flags(flags), name, self._plain_transform)
        return values[0] if ranks.isdigit() else values

    def push(self, names: list[str]) -> None:
        """Give the notebook's values to all kept ranks."""
        kept = require_kept(self.session, "push to")
        pragma = parse_flags(f"--gpus {kept.place.num_ranks} --with {','.join(names)}")
        run_cell_for_value(self.shell, self.session, pragma, "", self._plain_transform, anew=frozenset(names))

    def _plain_transform(self, source: str) -> str:
        """IPython's transformation without ours, for the text that ranks will run."""
        self._is_transforming = False
        try:
            transformed: str = self.shell.transform_cell(source)
            return transformed
        finally:
            self._is_transforming = True

    @contextlib.contextmanager
    def errors_without_frames(self) -> Iterator[None]:
        """Show our own errors as their text: the frames of this package help nobody."""
        try:
            yield
        except TaasError as error:
            if not hasattr(error, "_render_traceback_"):
                text = f"{type(error).__name__}: {error}"
                error._render_traceback_ = text.splitlines  # type: ignore[attr-defined]
            raise
        except SyntaxError as error:
            if not hasattr(error, "_render_traceback_"):
                lines = self.shell.SyntaxTB.structured_traceback(type(error), error, [])  # type: ignore[arg-type, unused-ignore]
                error._render_traceback_ = lambda: lines  # type: ignore[attr-defined]
            raise

    def show_traceback(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        """Show a syntax error or an exception group of ranks as it came; IPython asks only other kinds for that."""
        kind, error, _ = self.shell._get_exc_info(exc_tuple)
        render = getattr(error, "_render_traceback_", None)
        if render is not None and isinstance(error, (SyntaxError, BaseExceptionGroup)):
            self.shell._showtraceback(kind, error, render())
        else:
            type(self.shell).showtraceback(self.shell, exc_tuple, *args, **kwargs)

    def preload(self, *_: Any) -> None:
        """After each cell: tell the runner of what the notebook has newly imported."""
        wanted = installed_modules(self.shell.user_ns), rank_environment()
        if wanted[0] and wanted != self._preloaded:
            self._preloaded = wanted
            self.session.preload(*wanted)

    # -- the cell that loads us ----------------------------------------------------------------------------------

    def take_over_current_cell(self) -> None:
        """Handle a pragma in the very cell that says ``%load_ext taas_magic``.

        IPython has transformed that cell before we were there, and would run the rest of it in the kernel. It runs
        statement by statement; so the next one is replaced by the whole cell's run, and those after it are passed over.
        """
        source = self._current_source()
        if source is not None and _has_pragma(source):
            _RestOfCell(self, source).install()

    def _current_source(self) -> str | None:
        history = self.shell.history_manager
        if history is None:
            return None
        source: str = history.input_hist_raw[-1]
        return source if "load_ext" in source else None


class _RestOfCell:
    """Stands in for ``shell.run_code`` until the current cell is over."""

    def __init__(self, extension: Extension, source: str) -> None:
        self._extension = extension
        self._source = source
        self._has_run = False
        self._failed = False

    def install(self) -> None:
        shell = self._extension.shell
        self._run_code: Any = shell.run_code
        # The statement that loads us is running inside run_code; what comes next goes through the replacement.
        shell.run_code = self.run_code  # type: ignore[method-assign]
        shell.events.register("post_run_cell", self.restore)

    def restore(self, *_: Any) -> None:
        shell = self._extension.shell
        with contextlib.suppress(AttributeError):
            del shell.run_code
        with contextlib.suppress(ValueError):
            shell.events.unregister("post_run_cell", self.restore)

    async def run_code(self, code_obj: CodeType, result: Any = None, *, async_: bool = False) -> bool:
        if self._has_run:
            return self._failed
        self._has_run = True
        code = compile(_call_of(_PRAGMA_MAGIC, self._source), "<taas>", "exec")
        self._failed = await self._run_code(code, result, async_=False)
        return self._failed


def _has_pragma(source: str) -> bool:
    """Whether a cell has a pragma, valid or not: what is wrong with it is said when the cell runs."""
    try:
        return parse_cell(source) is not None
    except PragmaError:
        return True


def _call_of(magic: str, source: str) -> str:
    return f"get_ipython().run_cell_magic({magic!r}, '', {source!r})\n"


_extensions: dict[int, Extension] = {}


def load(shell: InteractiveShell) -> None:
    """Load taas into a shell; loading again does nothing."""
    if id(shell) not in _extensions:
        extension = Extension(shell)
        extension.install()
        _extensions[id(shell)] = extension
        extension.take_over_current_cell()


def unload(shell: InteractiveShell) -> None:
    """Unload taas from a shell."""
    extension = _extensions.pop(id(shell), None)
    if extension is not None:
        extension.remove()
