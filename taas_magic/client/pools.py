"""A session whose runs are on the machines of a pool; what it needs of them is behind a gateway."""

from __future__ import annotations

import contextlib
import getpass
import os
import socket
from dataclasses import dataclass, replace

import msgspec

from taas_magic.client.run import View
from taas_magic.client.runner_process import RunnerProcess
from taas_magic.client.session import Place, Session
from taas_magic.errors import PlacementError, TaasError
from taas_magic.machines.keys import own_keys
from taas_magic.machines.machine_list import Machine
from taas_magic.namespace.store import BlockStore
from taas_magic.pools import place
from taas_magic.pragma import Pragma
from taas_magic.settings import PoolSettings, Settings
from taas_magic.units import plural
from taas_magic.wire import PoolMachine
from taas_magic.wire_machines import GatewayOrder, MachineAddress, SshMachine


class GatewayProcess(RunnerProcess):
    """Our own process that stands for a pool."""

    _module = "taas_magic.gateway"


class PoolSession(Session):
    """One notebook's connection to a pool."""

    def __init__(self, pool: PoolSettings, settings: Settings, store: BlockStore) -> None:
        super().__init__(store)
        self.pool = pool
        #: The directory that the machines have a copy of.
        self.project = pool.code_dir or settings.project.directory

    def _new_runner(self) -> RunnerProcess:
        return GatewayProcess(msgspec.json.encode(self.order()).decode() + "\n")

    def order(self) -> GatewayOrder:
        """How the pool is reached."""
        keys, pool = own_keys("notebook"), self.pool
        owner = f"{getpass.getuser()}@{socket.gethostname()}"
        runners = [MachineAddress(each.name, each.address, each.key) for each in pool.runners]
        over_ssh = [
            SshMachine(each.name, each.host, each.user, each.port, each.slots, each.address) for each in pool.machines
        ]
        return GatewayOrder(
            pool.name,
            f"{owner}, process {os.getpid()}",
            pool.lease_s,
            (keys.public, keys.secret),
            runners if pool.engine == "runner" else [],
            over_ssh if pool.engine == "ssh" else [],
            pool.python,
            pool.tunnel,
            pool.gpus,
            str(pool.ssh_config or ""),
            str(self.project),
            f"{owner}:{self.project}",
            "",
            int(pool.code_limit_mib * 2**20),
        )

    @property
    def machines(self) -> list[PoolMachine]:
        """What is known of the machines now; nothing while there is no connection."""
        if self._runner is None or not self._runner.is_alive:
            return []
        with contextlib.suppress(TaasError), self._alone("ask its machines"):
            self._runner.greet()
            self._runner.take_notice()
        return self._runner.machines

    def ready_for(self, pragma: Pragma, view: View) -> tuple[RunnerProcess, Place]:
        """The gateway, and which machines a run takes; machines that were lost are tried once more for it.

        Raises:
            RunnerLostError: if the head cannot be reached.
            PlacementError: if the machines cannot hold the run.
        """
        runner, _ = self.ready_runner(view)
        try:
            return runner, place_in_pool(self.pool, pragma, runner.machines)
        except PlacementError:
            if not any(each.lost for each in runner.machines):
                raise
        self.close()
        runner, _ = self.ready_runner(view)
        for each in runner.machines:
            if each.lost:
                view.notice(f"{each.name} cannot be used: {each.lost}")
        return runner, place_in_pool(self.pool, pragma, runner.machines)


def describe_pool(pool: PoolSettings, machines: list[PoolMachine]) -> str:
    """What a pool has: the names of its machines, and, where they are known, GPUs and trouble, a line a machine."""
    if not machines:
        names = [each.name for each in pool.machines] or [each.name for each in pool.runners]
        return f"{pool.engine}, {', '.join(names) or 'this machine'}; not connected"
    lines: list[str] = [pool.engine]
    for each in machines:
        has = plural(each.num_gpus, "GPU") if each.has_cuda else f"{plural(each.num_gpus, 'rank')} on CPU"
        free = f", {each.free} free" if each.free >= 0 else ""
        lines.append(f"  {each.name}: " + (f"lost: {each.lost}" if each.lost else has + free))
    return "\n".join(lines)


@dataclass(frozen=True)
class PoolPlace(Place):
    """Where a run goes on the machines of a pool."""

    pool: str = ""
    machines: tuple[str, ...] = ()

    @property
    def notice(self) -> str:
        """What to say of it at the head of the output."""
        used = ", ".join(
            f"{name} ({count})" for name, count in zip(self.machines, self.ranks_of_machines, strict=True) if count
        )
        rehearsal = ", rehearsing on CPU: 'nccl' is answered by 'gloo'" if self.rehearse else ""
        return f"on {self.pool}: {used}{rehearsal}"


def place_in_pool(pool: PoolSettings, pragma: Pragma, machines: list[PoolMachine]) -> PoolPlace:
    """Decide which machines a run takes.

    Raises:
        PlacementError: if they cannot hold it.
    """
    usable = [each.num_gpus if not each.lost else 0 for each in machines]
    counts = place(pool, pragma.gpus, pragma.gpus_per_machine, usable)
    rehearses = not all(each.has_cuda for each, count in zip(machines, counts, strict=True) if count)
    return PoolPlace(pragma.gpus, rehearses, tuple(counts), pool.name, tuple(each.name for each in machines))


def detachable(pool: PoolSettings) -> PoolSettings:
    """A pool whose runs can go on without the notebook: this machine gets a runner that does not end with it."""
    if pool.engine != "local":
        return pool
    return replace(pool, engine="ssh", machines=(Machine("127.0.0.1"),), tunnel=True, python=None)
