"""A session's share in runs that have several machines: the parts elsewhere of its own, and parts here of others'."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from taas_magic.runner.parts import HeldPart, RemotePart
from taas_magic.runner.run import Source
from taas_magic.runner.zygote_link import Meeting, PreloadedZygote, RunLink, ZygoteLink
from taas_magic.wire import Submit
from taas_magic.wire_base import Message
from taas_magic.wire_machines import BeginPart, EndPart, Members, PartData, PartEnded, PartNotice
from taas_magic.wire_zygote import GuardedProject

_BACKLOG = 1024


class Parts:
    """The parts of runs that this session has to do with.

    Args:
        zygote: What parts that are here are forked from.
        directory: Where their directories are made.
        send: Sends a message to the runner of this machine, which hands it on.
    """

    def __init__(self, zygote: ZygoteLink, directory: Path, send: Callable[[Message], None]) -> None:
        self._zygote = zygote
        self._directory = directory
        self._send = send
        self.members = Members("")
        self._numbers = itertools.count()
        self._remote: dict[int, RemotePart] = {}
        self._held: dict[int, HeldPart] = {}

    # -- the head's side -----------------------------------------------------------------------------------------

    def start(self, submit: Submit, preloaded: PreloadedZygote | None, guarded: GuardedProject | None) -> RunLink:
        """Start the processes of a run on several machines.

        Raises:
            OSError: if a machine lacks something for it; nothing is left behind then.
        """
        counts = submit.ranks_of_machines
        used = [(machine, count) for machine, count in enumerate(counts) if count]
        family = socket.AF_INET6 if ":" in self.members.address else socket.AF_INET
        with socket.create_server((self.members.address, 0), family=family, backlog=_BACKLOG) as listener:
            address, port = listener.getsockname()[:2]
            meeting = Meeting(
                address,
                port,
                num_nodes=len(used),
                environment=submit.environment_here,
                listener=(listener.fileno(),),
            )
            link = self._zygote.prepare_run(counts[0], preloaded, guarded, meeting)
        first = counts[0]
        for node_rank, (machine, count) in enumerate(used[1:], start=1):
            number = next(self._numbers)
            name = self.members.machines[machine - 1]
            part = self._remote[number] = RemotePart(number, name, first, count, self._send)
            self._send(
                BeginPart(
                    number,
                    machine - 1,
                    submit.task.run_id,
                    count,
                    first,
                    submit.task.num_ranks,
                    node_rank,
                    len(used),
                    address,
                    port,
                    guarded,
                    submit.task.environment,
                    is_detached=submit.task.is_detached,
                )
            )
            link.add(part)
            first += count
        return link

    # -- the side of other machines ------------------------------------------------------------------------------

    def begin(self, order: BeginPart, preloaded: PreloadedZygote | None) -> None:
        """Start the processes of a part here."""
        directory = self._directory / f"part-{order.run_id}-{order.part}"
        try:
            directory.mkdir(mode=0o700)
            meeting = Meeting(
                order.master_addr,
                order.master_port,
                order.node_rank,
                order.num_nodes,
                order.first_rank,
                self.members.project,
                str(directory),
                order.environment_here,
            )
            guarded = order.guarded
            if guarded is not None:
                project = self.members.project or guarded.project
                guarded = msgspec.structs.replace(guarded, project=project, run_dirs=str(self._directory))
            link = self._zygote.prepare_run(order.num_ranks, preloaded, guarded, meeting)
        except OSError as error:
            self._send(PartEnded(order.part, f"its processes cannot be started: {error}"))
            return
        self._held[order.part] = HeldPart(order.part, link, directory, self._send)

    # -- both ----------------------------------------------------------------------------------------------------

    def take(self, message: PartData | PartNotice | PartEnded | EndPart) -> None:
        """Take what another machine says."""
        if isinstance(message, PartData):
            self._take_data(message, [file.open() for file in message.files])
        elif isinstance(message, EndPart):
            if message.part in self._held:
                self._held[message.part].end()
        elif message.part in self._remote:
            part = self._remote[message.part]
            if isinstance(message, PartEnded):
                part.end(message.reason)
                del self._remote[message.part]
            elif part.listener is not None:
                part.listener.take_notice(message.text)

    def _take_data(self, message: PartData, descriptors: list[int]) -> None:
        remote, held = self._remote.get(message.part), self._held.get(message.part)
        if remote is not None:
            remote.take(message, descriptors)
            return
        if held is not None:
            held.take(message, descriptors)
        for fd in descriptors:
            os.close(fd)

    def sources(self) -> Iterator[Source]:
        """Everything here that can become readable."""
        for part in self._held.values():
            yield from part.sources()

    def deadline(self) -> float | None:
        """Seconds until something here is due."""
        return min((due for part in self._held.values() if (due := part.deadline()) is not None), default=None)

    def tick(self) -> None:
        """Let go of parts that are over."""
        for number, part in list(self._held.items()):
            if part.is_over:
                part.close()
                del self._held[number]

    @property
    def are_here(self) -> bool:
        """Whether this session holds a part."""
        return bool(self._held)

    def close(self) -> None:
        """End all parts that are here."""
        for part in self._held.values():
            part.end()
            part.close()
        self._held.clear()


def spans_machines(submit: Submit) -> bool:
    """Whether a run has ranks on more than one machine."""
    return sum(count > 0 for count in submit.ranks_of_machines) > 1
