"""The process that a delivery descends from: it forks the nursery, and ends all of it when the runner says so.

It runs no code of the user's, so nothing keeps it from ending what does.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

import setproctitle

from taas_magic import processes
from taas_magic.channel import Channel, ChannelClosedError
from taas_magic.data.nursery import Nursery
from taas_magic.rank import landlock, output, rulesets
from taas_magic.rank.writes import writable_for_all
from taas_magic.wire_data import BeginDelivery, DeliveryEnded, DeliveryTask, ToDelivery

#: The coordinator has ended by itself by then, and the nursery with it.
_END_S = 0.5
#: The nursery's way to say that it must not be forked after loading.
_HAS_THREADS = 3


def serve(control: socket.socket) -> None:
    """Serve one delivery; returns when it is over and no process of it is left."""
    setproctitle.setproctitle("taas: delivery keeper")
    processes.become_subreaper()
    channel: Channel[ToDelivery] = Channel(control, ToDelivery)
    watch = processes.ChildWatch()
    try:
        _, (coordinator_fd, stdout_fd, stderr_fd) = channel.receive()
        begin, parcel_fds = channel.receive()
        assert isinstance(begin, BeginDelivery)
        output.redirect(stdout_fd, stderr_fd)
        _restrict(begin.task)
        coordinator_socket = socket.socket(fileno=coordinator_fd)
        for loads_here in (True, False):
            pid = _fork_nursery(begin.task, parcel_fds, coordinator_socket, channel, watch, loads_here=loads_here)
            if _await(pid, channel, watch) != _HAS_THREADS:
                break
    except ChannelClosedError:
        # The coordinator hears that too, and ends in good order.
        select.select([watch.fileno()], [], [], _END_S)
    finally:
        processes.kill_descendants()


def _restrict(task: DeliveryTask) -> None:
    """Take the right to write in the project, as ranks other than 0 have none either."""
    if not task.project or landlock.abi_version() == 0:
        return
    project = Path(task.project)
    ruleset_fd = rulesets.ruleset_for(project, writable_for_all(task.environment, task.writable, Path(task.run_dirs)))
    landlock.restrict(ruleset_fd)
    os.close(ruleset_fd)


def _fork_nursery(
    task: DeliveryTask,
    parcel_fds: list[int],
    coordinator_socket: socket.socket,
    channel: Channel[ToDelivery],
    watch: processes.ChildWatch,
    *,
    loads_here: bool,
) -> int:
    parent = os.getpid()

    def be_nursery() -> None:
        watch.close()
        channel.close()
        processes.die_with_parent(parent)
        main: dict[str, Any] = sys.modules["__main__"].__dict__
        nursery = Nursery(task, parcel_fds, coordinator_socket, main)
        try:
            served = nursery.serve(loads_here=loads_here)
        except Exception as error:  # noqa: BLE001 - the user's code; it is told, and this process ends
            traceback.print_exc()
            text = "\n".join(traceback.format_exception_only(error)).strip()
            ended = DeliveryEnded(f"the registered loaders cannot be loaded in another process: {text}")
            with contextlib.suppress(Exception):
                Channel(coordinator_socket, ToDelivery).send(ended)
            return
        if not served:
            sys.exit(_HAS_THREADS)

    return processes.fork(be_nursery)


def _await(pid: int, channel: Channel[ToDelivery], watch: processes.ChildWatch) -> int:
    """Wait for the nursery's end.

    Raises:
        ChannelClosedError: if the runner lets go of the delivery before.
    """
    while True:
        ready = select.select([channel.fileno(), watch.fileno()], [], [])[0]
        if watch.fileno() in ready:
            watch.clear()
            codes = dict(processes.reap())
            if pid in codes:
                return codes[pid]
        if channel.fileno() in ready:
            for _ in channel.receive_available():
                pass
