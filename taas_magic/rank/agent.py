"""The agent of a run on a machine: torch elastic, with ranks that are forked from the run zygote.

Torch elastic assigns ranks, sets the environment that every torchrun script knows, watches the workers and restarts
them. What is ours is how a worker is started (a fork instead of an interpreter: milliseconds instead of seconds), and
who decides about membership: a generation's members are fixed, so the rendezvous has nothing to negotiate.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import select
import signal
import socket
import struct
import sys
from typing import Any

import setproctitle
import torch.distributed as dist
from torch.distributed.elastic.agent.server import SimpleElasticAgent, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.api import RunResult
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from taas_magic.channel import Channel, ChannelClosedError
from taas_magic.rank.identity import INTERFACE_VARIABLES, own_place
from taas_magic.wire_zygote import PrepareRun, RankExited, RankForked, Spawn, StopRanks, ToAgent

_LOOPBACK = "127.0.0.1"
_LOOPBACK_INTERFACE = "lo"
_SIOCGIFADDR = 0x8915
_MONITOR_INTERVAL_S = 0.01


def run_agent(order: PrepareRun, sock: socket.socket, listener: list[int]) -> None:
    """Run the agent of one run to its end. Exits 0 if all ranks did.

    Args:
        order: How many ranks there are, and where they meet those of other machines.
        sock: Its end of the connection to the run zygote.
        listener: The descriptor of the socket at which the run's machines meet, on the first of several.
    """
    setproctitle.setproctitle("taas: agent")
    logging.disable(logging.WARNING)
    channel: Channel[ToAgent] = Channel(sock, ToAgent)
    spec = WorkerSpec(
        role="default",
        local_world_size=order.num_ranks,
        rdzv_handler=FixedMembership(order, listener),
        entrypoint="taas",
        max_restarts=order.max_restarts,
        monitor_interval=_MONITOR_INTERVAL_S,
    )
    try:
        result = ForkingAgent(spec, channel, order).run()
    except (ChannelClosedError, SignalException):
        sys.exit(1)
    sys.exit(1 if result.is_failed() else 0)


def _interface_of(order: PrepareRun) -> str:
    """The interface that gloo and NCCL are to use; "" where they had better look for themselves."""
    if order.num_nodes == 1:
        # The ranks of one machine need no interface that others can reach.
        return _LOOPBACK_INTERFACE
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe, contextlib.suppress(OSError):
        # Nothing is sent by that: it only says from which address one would.
        probe.connect((order.master_addr, order.master_port or 1))
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            if _address_of(probe, name) == own:
                return name
    return ""


def _address_of(sock: socket.socket, interface: str) -> str:
    with contextlib.suppress(OSError):
        answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return ""


class FixedMembership(RendezvousHandler):
    """A rendezvous whose members are known: the machines of the run. The first hosts the store that the ranks meet at.

    The store listens on a port that the system chose and that stays bound from then on, so nobody can take it in
    between.
    """

    def __init__(self, order: PrepareRun, listener: list[int]) -> None:
        # All machines have to say the same.
        self._run_id = "run" if order.num_nodes > 1 else secrets.token_hex(4)
        self._order = order
        self._listener = listener
        self._closed = False
        self._store: dist.TCPStore | None = None

    def get_backend(self) -> str:
        """See the base class."""
        return "taas"

    @property
    def use_agent_store(self) -> bool:
        """See the base class."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """See the base class."""
        order = self._order
        address = order.master_addr or _LOOPBACK
        if self._store is None and order.node_rank == 0:
            self._store = _listening_store(address, self._listener)
        elif self._store is None:
            self._store = dist.TCPStore(address, order.master_port, is_master=False, wait_for_workers=False)
        store = dist.PrefixStore(f"{self._run_id}/", self._store)
        return RendezvousInfo(store, order.node_rank, order.num_nodes, RendezvousStoreInfo(address, self._store.port))

    def is_closed(self) -> bool:
        """See the base class."""
        return self._closed

    def set_closed(self) -> None:
        """See the base class."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """See the base class."""
        return 0

    def get_run_id(self) -> str:
        """See the base class."""
        return self._run_id

    def shutdown(self) -> bool:
        """See the base class."""
        self._closed = True
        return True


def _listening_store(address: str, listeners: list[int]) -> dist.TCPStore:
    """A store that listens on one address only; by itself torch's listens on every interface."""
    listener = socket.socket(fileno=listeners[0]) if listeners else socket.create_server((address, 0), backlog=1024)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach()
    )


class ForkingAgent(SimpleElasticAgent):
    """Torch elastic's agent; see torch/distributed/elastic/agent/server/api.py for what each method has to do."""

    def __init__(self, spec: WorkerSpec, channel: Channel[ToAgent], order: PrepareRun) -> None:
        super().__init__(spec, exit_barrier_timeout=30)
        #: The interface by which ranks of several machines reach each other; loopback where there is one machine.
        self._interface = _interface_of(order)
        self._own_place = {**order.environment, **own_place(order)}
        self._channel = channel
        self._pids: dict[int, int] = {}
        self._exit_codes: dict[int, int] = {}

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._pids.clear()
        self._exit_codes.clear()
        for worker in worker_group.workers:
            environment = self._environment(worker_group, worker)
            self._channel.send(Spawn(worker.local_rank, worker.global_rank, environment))
        while len(self._pids) < len(worker_group.workers):
            self._take(*self._channel.receive())
        return {worker.local_rank: self._pids[worker.global_rank] for worker in worker_group.workers}

    def _environment(self, group: WorkerGroup, worker: Any) -> dict[str, str]:
        spec = group.spec
        return {
            "RANK": str(worker.global_rank),
            "LOCAL_RANK": str(worker.local_rank),
            "WORLD_SIZE": str(worker.world_size),
            "LOCAL_WORLD_SIZE": str(spec.local_world_size),
            "GROUP_RANK": str(group.group_rank),
            "GROUP_WORLD_SIZE": str(group.group_world_size),
            "ROLE_RANK": str(worker.role_rank),
            "ROLE_NAME": spec.role,
            "ROLE_WORLD_SIZE": str(worker.role_world_size),
            "MASTER_ADDR": str(group.master_addr),
            "MASTER_PORT": str(group.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(spec.max_restarts - self._remaining_restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": str(spec.rdzv_handler.use_agent_store),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            **self._own_place,
            **(dict.fromkeys(INTERFACE_VARIABLES, self._interface) if self._interface else {}),
        }

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        for message, _ in self._channel.receive_available():
            self._take(message, [])
        failures = {rank: code for rank, code in self._exit_codes.items() if code != 0}
        if failures:
            return RunResult(WorkerState.FAILED, failures={rank: self._failure(rank) for rank in failures})
        if len(self._exit_codes) == len(worker_group.workers):
            return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(self._exit_codes))
        # Instead of the base class's sleep until the next look: wake when a rank ends.
        select.select([self._channel], [], [], 1.0)
        return RunResult(WorkerState.HEALTHY)

    def _failure(self, rank: int) -> ProcessFailure:
        return ProcessFailure(rank, self._pids.get(rank, 0), self._exit_codes[rank], error_file="<none>")

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Wait for the other ranks: the runner stops them itself, since rank 0 may have a model to bring home.

        Only a restart, where a new generation follows, kills them from here.
        """
        if self._remaining_restarts > 0 and len(self._exit_codes) < len(self._pids):
            self._channel.send(StopRanks())
        while len(self._exit_codes) < len(self._pids):
            self._take(*self._channel.receive())

    def _take(self, message: ToAgent, _: list[int]) -> None:
        if isinstance(message, RankForked):
            self._pids[message.rank] = message.pid
        elif isinstance(message, RankExited):
            self._exit_codes[message.rank] = message.exit_code
