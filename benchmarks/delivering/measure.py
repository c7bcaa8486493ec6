"""Takes the rates: one visit starts a contestant, has it deliver for a while, and ends all that it left."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from launching.notebook import Notebook, NotebookError

from delivering.contestants import Contestant, Ours, Program
from taas_magic.processes import kill_descendants

_LIMIT_S = 90.0
_BENCHMARKS = Path(__file__).resolve().parents[1]
_REGISTER = """\
import taas
from delivering.torch_loaders import loader_for
loader = loader_for({measure!r})
taas.register(loader)
"""
_TAKE = """\
#pragma taas --gpus 1 --cpus 1
from pathlib import Path
from delivering.workloads import pace
Path({out!r}).write_text(repr(pace(loader, {warm_s}, {window_s})))
"""


@dataclass
class Samples:
    """What was measured of a contestant: elements a second, by round; and what went wrong."""

    rates: dict[int, float] = field(default_factory=dict)
    #: Why nothing can be measured at all.
    unavailable: str | None = None
    problems: Counter[str] = field(default_factory=Counter)

    @property
    def is_hopeless(self) -> bool:
        """Whether there is no use in another try."""
        return self.unavailable is not None or (not self.rates and self.problems.total() > 1)


@dataclass(frozen=True)
class Bench:
    """What all measurements share.

    Attributes:
        pythons: The interpreters, by whose they are.
        directory: For files.
        warm_s: How long a contestant delivers before it is measured.
        window_s: And then.
    """

    pythons: dict[str, str]
    directory: Path
    warm_s: float
    window_s: float

    @property
    def _out(self) -> Path:
        return self.directory / "out"

    def visit(self, contestant: Contestant, number: int, samples: Samples) -> None:
        """Measure a contestant once, as part of a round."""
        if samples.is_hopeless:
            return
        self._out.unlink(missing_ok=True)
        try:
            if isinstance(contestant.how, Ours):
                self._run_ours(contestant.how)
            else:
                self._run_program(contestant.how)
            samples.rates[number] = float(self._out.read_text(encoding="utf-8"))
        except (NotebookError, subprocess.SubprocessError, OSError) as error:
            samples.problems[str(error)] += 1
        finally:
            kill_descendants()

    def _run_ours(self, how: Ours) -> None:
        with self.notebook(how) as notebook:
            run_cell(notebook, _TAKE.format(out=str(self._out), warm_s=self.warm_s, window_s=self.window_s), _LIMIT_S)

    @contextlib.contextmanager
    def notebook(self, how: Ours, register: str = _REGISTER) -> Iterator[Notebook]:
        """A notebook in which ``loader`` is registered; nothing is prepared before a rank runs."""
        settings = f'processes = {how.num_processes}\ntransport = "{how.transport}"\nmemory_mib = {how.memory_mib}\n'
        text = f"[delivery]\n{settings}prepare_mib = 0\nprepare_s = 0\n"
        (self.directory / "taas.toml").write_text(text, encoding="utf-8")
        notebook = Notebook(self.pythons["ours"], self.directory / "notebook.log", self._environment("ours"))
        try:
            run_cell(notebook, f"import os; os.chdir({str(self.directory)!r})\n%load_ext taas_magic", _LIMIT_S)
            run_cell(notebook, register.format(measure=how.measure), _LIMIT_S)
            yield notebook
        finally:
            notebook.close()
            kill_descendants()

    def _run_program(self, how: Program) -> None:
        log = self.directory / "program.log"
        command = [self.pythons[how.python], "-m", f"delivering.{how.module}", how.argument, str(how.num_processes)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, str(self.warm_s), str(self.window_s), str(self._out)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment(how.python),
                cwd=self.directory,
                start_new_session=True,
            )
        try:
            exit_code = process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise NotebookError(f"not over after {_LIMIT_S:.0f} s") from error
        finally:
            process.kill()
            process.wait()
        if exit_code:
            raise NotebookError(f"ended with {exit_code}; it had printed: {_tail(log)}")

    def _environment(self, python: str) -> dict[str, str]:
        paths = [str(_BENCHMARKS)]
        if python == "ours":
            paths += [str(_BENCHMARKS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONUNBUFFERED": "1",
            # What is killed at the end of a visit cannot tidy up; its files go with the directory.
            "TMPDIR": str(self.directory),
            "HOME": str(self.directory),
            "RAY_AUTH_MODE": "disabled",
            "RAY_DEDUP_LOGS": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
        }


def run_cell(notebook: Notebook, source: str, limit_s: float, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Run a cell; ``meanwhile`` is called again and again until it has ended.

    Raises:
        NotebookError: if it fails.
    """
    run = notebook.run(source, limit_s, meanwhile)
    if run.error is not None:
        raise NotebookError(f"{run.error}; it had printed: {notebook.log_tail()}")


def _tail(log: Path, num_characters: int = 300) -> str:
    return log.read_text(errors="replace")[-num_characters:].replace("\n", " ")
