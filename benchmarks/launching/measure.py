"""Takes the measurements: one visit opens a notebook for a contestant, launches, and ends all that it left."""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from launching.contestants import Contestant
from launching.jobs import KINDS, Job
from launching.notebook import Notebook, NotebookError
from taas_magic.processes import kill_descendants

_SETUP_LIMIT_S = 120.0
_LAUNCH_LIMIT_S = 120.0
#: How long a cell may go on after a rank has raised, or after the interrupt.
_REACTION_LIMIT_S = 20.0
_PAUSE_S = 1.0


#: What a kind of job measures.
_MEASURES = {"launch": ("user", "reduced"), "empty": ("empty",), "failure": ("failure",), "stop": ("stop",)}


@dataclass
class Samples:
    """What was measured of one contestant with one number of ranks; seconds, by measure.

    Measures: ``user``, ``reduced`` (from submit to that on all ranks), ``empty`` (an empty cell, to idle), ``failure``
    (from a raise to the cell's error), ``stop`` (from SIGINT to idle).
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    #: Why nothing can be measured at all.
    unavailable: str | None = None
    #: What went wrong, and how often, by kind of job.
    problems: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, measure: str, seconds: float) -> None:
        """Note one sample."""
        self.seconds.setdefault(measure, []).append(seconds)

    def note(self, kind: str, problem: str) -> None:
        """Note that something went wrong."""
        self.problems.setdefault(kind, Counter())[problem] += 1

    def is_hopeless(self, kind: str) -> bool:
        """Whether a kind of job has only ever gone wrong, and more than once."""
        return self.problems.get(kind, Counter()).total() > 1 and not self.seconds.get(_MEASURES[kind][0])


@dataclass(frozen=True)
class Bench:
    """What all measurements share.

    Attributes:
        python: The interpreter of contestants that are no peers.
        peers_python: That of peers.
        directory: For files of jobs.
        launches: Measured launches a visit, of contestants that warm up.
        kinds: The kinds of job to measure.
    """

    python: str
    peers_python: str
    directory: Path
    launches: int
    kinds: tuple[str, ...] = KINDS
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def visit(self, contestant: Contestant, num_ranks: int, samples: Samples) -> None:
        """Measure every kind of job once or a few times; what keeps going wrong is not tried again."""
        todo = [kind for kind in contestant.kinds if kind in self.kinds and not samples.is_hopeless(kind)]
        while todo and samples.unavailable is None:
            self._one_notebook(contestant, num_ranks, samples, todo)

    def _one_notebook(self, contestant: Contestant, num_ranks: int, samples: Samples, todo: list[str]) -> None:
        """Work off ``todo`` until it is empty or the notebook cannot be used any more."""
        with self._notebook(contestant) as notebook:
            try:
                self._prepare(contestant, num_ranks, notebook)
            except NotebookError as error:
                for kind in todo:
                    samples.note(kind, f"setting up: {error}")
                todo.clear()
            while todo and notebook.is_usable:
                kind = todo.pop(0)
                repeats = self.launches if contestant.warms_up and kind in ("launch", "empty") else 1
                try:
                    for _ in range(repeats):
                        self._launch(contestant, self._job(kind, num_ranks), notebook, samples)
                except NotebookError as error:
                    samples.note(kind, str(error))

    @contextmanager
    def _notebook(self, contestant: Contestant) -> Iterator[Notebook]:
        python = self.peers_python if contestant.is_peer else self.python
        path = f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # nbdistributed starts "python"
        # One interface for all, so that nobody has to ask a name server which one the machine's name belongs to.
        environment = {**os.environ, "PATH": path, "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
        # What is killed at the end of a visit cannot tidy up; its files go with the directory.
        environment["TMPDIR"] = str(self.directory)
        notebook = Notebook(python, self.directory / "notebook.log", environment)
        try:
            yield notebook
        finally:
            notebook.close()
            kill_descendants()

    def _prepare(self, contestant: Contestant, num_ranks: int, notebook: Notebook) -> None:
        cells = ["import torch", contestant.setup(num_ranks)]
        if contestant.warms_up:
            cells.append(contestant.cell(self._job("launch", num_ranks)))
        for cell in cells:
            run = notebook.run(cell, _SETUP_LIMIT_S)
            if run.error is not None:
                raise NotebookError(run.error)

    def _job(self, kind: str, num_ranks: int) -> Job:
        directory = self.directory / f"{kind}-{next(self._numbers)}"
        directory.mkdir()
        return Job(kind, num_ranks, directory)

    def _launch(self, contestant: Contestant, job: Job, notebook: Notebook, samples: Samples) -> None:
        # Nobody starts a cell in the very moment in which the one before ends.
        time.sleep(_PAUSE_S)
        watch = _Watch(job, notebook)
        run = notebook.run(contestant.cell(job), _LAUNCH_LIMIT_S, watch.look)
        if job.kind == "failure" and run.error is None:
            raise NotebookError("the cell ended without an error")
        if job.kind in ("launch", "empty") and run.error is not None:
            raise NotebookError(f"{run.error}; it had printed: {notebook.log_tail()}")
        if job.kind == "launch":
            stamps = job.stamps()
            if len(stamps) != job.num_ranks:
                raise NotebookError(f"{len(stamps)} of {job.num_ranks} ranks ran; {notebook.log_tail()}")
            samples.add("user", max(user_at for user_at, _ in stamps) - run.submitted_at)
            samples.add("reduced", max(reduced_at for _, reduced_at in stamps) - run.submitted_at)
        elif job.kind == "empty":
            samples.add("empty", run.idle_at - run.submitted_at)
        elif watch.since is None:
            raise NotebookError(run.error or "the cell ended before it was interrupted")
        else:
            samples.add(job.kind, run.idle_at - watch.since)
        if contestant.teardown is not None:
            notebook.run(contestant.teardown, _SETUP_LIMIT_S)


class _Watch:
    """Looks at a failing or endless job: sends the interrupt, notes since when the cell should be over."""

    def __init__(self, job: Job, notebook: Notebook) -> None:
        self._job = job
        self._notebook = notebook
        self.since: float | None = None

    def look(self) -> None:
        """To be called while the cell runs.

        Raises:
            NotebookError: if the cell goes on for too long.
        """
        if self._job.kind not in ("failure", "stop"):
            return
        if self.since is None:
            stamps = self._job.stamps()
            if self._job.kind == "failure" and stamps:
                self.since = stamps[0][0]
            elif self._job.kind == "stop" and len(stamps) == self._job.num_ranks:
                self.since = time.monotonic()
                self._notebook.interrupt()
        elif time.monotonic() - self.since > _REACTION_LIMIT_S:
            raise NotebookError(f"not over after {_REACTION_LIMIT_S:.0f} s")
