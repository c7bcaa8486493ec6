"""Runs that go on by themselves: written down where they are, and taken up again, from whatever kernel."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from taas_magic.client.interrupts import counted_interrupts
from taas_magic.client.pools import GatewayProcess
from taas_magic.client.run import ActiveRun, RunOutcome, RunRequest, View
from taas_magic.client.runner_process import RunnerProcess
from taas_magic.client.session import Session
from taas_magic.errors import PlacementError, TaasError
from taas_magic.machines.keys import own_keys
from taas_magic.namespace.pack import load_namespace
from taas_magic.namespace.store import BlockStore
from taas_magic.units import format_seconds
from taas_magic.wire import AttachRun, CellTask, HomeArrived, HomeTaken, Interrupt
from taas_magic.wire_machines import GatewayOrder

_NO_KEYS = ("", "")


@dataclass(frozen=True)
class DetachedRun:
    """What is written down of a run.

    Attributes:
        id: The run.
        order: How its pool is reached; without the keys.
        first_line: Of the cell's code.
        num_ranks: How many ranks it has.
        started_at: When it was submitted, in seconds since the epoch.
    """

    id: str
    order: GatewayOrder
    first_line: str
    num_ranks: int
    started_at: float

    def __str__(self) -> str:
        age = format_seconds(time.time() - self.started_at)
        return f"{self.id}  on {self.order.pool}, {self.num_ranks} ranks, for {age}: {self.first_line}"


def _directory(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_STATE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".local" / "state") / "taas" / "runs"


def write_down(run: DetachedRun) -> None:
    """Note a run, for kernels to come."""
    directory = _directory(os.environ)
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    order = msgspec.structs.replace(run.order, keys=_NO_KEYS, attach=run.id)
    text = {
        "order": msgspec.json.encode(order).decode(),
        "first_line": run.first_line,
        "num_ranks": run.num_ranks,
        "started_at": run.started_at,
    }
    (directory / f"{run.id}.json").write_text(json.dumps(text), encoding="utf-8")


def runs() -> list[DetachedRun]:
    """The runs that are written down, the latest last."""
    found = []
    for path in _directory(os.environ).glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, msgspec.MsgspecError):
            text = json.loads(path.read_text(encoding="utf-8"))
            order = msgspec.json.decode(text["order"], type=GatewayOrder)
            found.append(
                DetachedRun(path.stem, order, text["first_line"], int(text["num_ranks"]), float(text["started_at"]))
            )
    return sorted(found, key=lambda run: run.started_at)


def find(run_id: str) -> DetachedRun:
    """A run that is written down; "" is the latest.

    Raises:
        PlacementError: if there is no such run.
    """
    known = runs()
    for run in reversed(known):
        if run_id in (run.id, ""):
            return run
    raise PlacementError.of(
        f"there is no run {run_id}" if run_id else "there is no run that goes on by itself",
        expected=", ".join(run.id for run in known) or "a run that was started with --detach",
        do="`%taas runs` lists them",
    )


def forget(run_id: str) -> None:
    """A run is over, and what came of it has been taken."""
    (_directory(os.environ) / f"{run_id}.json").unlink(missing_ok=True)


class AttachedSession(Session):
    """A connection to where a run goes on by itself."""

    def __init__(self, run: DetachedRun, store: BlockStore) -> None:
        super().__init__(store)
        self._order = msgspec.structs.replace(run.order, keys=_keys())

    def _new_runner(self) -> RunnerProcess:
        return GatewayProcess(msgspec.json.encode(self._order).decode() + "\n")

    def follow(self, run: DetachedRun, main: dict[str, Any], view: View, *, stops: bool) -> RunOutcome:
        """Take the run up, and follow it to its end; an interrupt leaves it again.

        Raises:
            RunnerLostError: if it cannot be reached.
            KeyboardInterrupt: if the user does not want to wait; the run goes on.
        """
        runner, _ = self.ready_runner(view)
        return AttachedRun(runner, run, main, view).drive_attached(stops=stops)


def _keys() -> tuple[str, str]:
    keys = own_keys("notebook")
    return keys.public, keys.secret


class AttachedRun(ActiveRun):
    """A run that this kernel, or this notebook, did not submit."""

    def __init__(self, runner: RunnerProcess, run: DetachedRun, main: dict[str, Any], view: View) -> None:
        task = CellTask(run.id, "", 0, run.num_ranks, "", [], "rank0", {}, [], [])
        nothing: Any = None
        super().__init__(runner, RunRequest(task, nothing, None, 0.0, None, nothing), main, view)

    def drive_attached(self, *, stops: bool) -> RunOutcome:
        """Follow the run; ``stops`` it first."""
        with counted_interrupts() as interrupts:
            self._runner.send(AttachRun(self._id))
            if stops:
                self._runner.send(Interrupt(self._id, 1))
            self._follow(interrupts)
        assert self._outcome is not None
        return self._outcome

    def _pass_on(self, interrupts: Any) -> None:
        if interrupts.count:
            raise KeyboardInterrupt(f"run {self._id} goes on; `%taas stop {self._id}` ends it")

    def _bring_home(self, message: HomeArrived) -> None:
        """Bind what the run has bound and changed; objects of this notebook are not changed in place."""
        self._packing.end()
        fd = message.parcel.open()
        try:
            received = load_namespace([fd], self._main)
        except Exception as error:  # noqa: BLE001 - whatever it was, it is said, and the run ends in good order
            self._refused.append(("", f"{type(error).__name__}: {error}"))
        else:
            self._home.extra.update(received.values)
            self._arrived = message
        finally:
            os.close(fd)
        self._runner.send(HomeTaken(self._id))


def require_alone(kept: object) -> None:
    """Refuse to leave a run alone where ranks are kept.

    Raises:
        TaasError: if some are.
    """
    if kept is not None:
        raise TaasError.of("--detach, and ranks are kept for this notebook", do="`%taas release` ends them")
