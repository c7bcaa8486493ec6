"""What a rank is on its machine: from what the notebook says, what the machine has, and what the agent knows."""

from __future__ import annotations

import os

import msgspec

from taas_magic.namespace.process_state import scrubbed
from taas_magic.places import in_directory
from taas_magic.wire import CellTask
from taas_magic.wire_zygote import PrepareRun, Spawn

#: The interface by which ranks reach each other; the user's own choice counts.
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_PROJECT, _RUN_DIR = "TAAS_PROJECT_DIR", "TAAS_RUN_DIR"


def rank_environment(task: CellTask, spawn: Spawn) -> dict[str, str]:
    """The environment in which a rank runs a cell."""
    own = scrubbed(dict(os.environ)) if task.adds_to_environment else {}
    given = {**own, **task.environment}
    chosen = {name: given[name] for name in INTERFACE_VARIABLES if name in given}
    return {**given, **spawn.environment, **chosen}


def own_place(order: PrepareRun) -> dict[str, str]:
    """What a machine tells its ranks where its directories are not where the task says."""
    return {name: path for name, path in ((_PROJECT, order.project), (_RUN_DIR, order.run_dir)) if path}


def on_this_machine(task: CellTask, spawn: Spawn) -> CellTask:
    """A task with the directories of this machine, which another machine's runner may not know."""
    project, run_dir = spawn.environment.get(_PROJECT), spawn.environment.get(_RUN_DIR)
    if run_dir:
        task = msgspec.structs.replace(task, run_dir=run_dir)
    if project:
        task = in_directory(task, project)
    return task
