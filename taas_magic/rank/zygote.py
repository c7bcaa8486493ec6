"""The zygote: one thread, torch imported, CUDA untouched. It forks a run zygote for every run.

Started by the runner as ``python -m taas_magic.rank.zygote FD``, where FD is its end of a socket pair.

Forking is only safe from a process with one thread: a lock that another thread holds at the fork stays locked in the
child for ever. OpenBLAS starts threads at import unless told not to (the runner sets ``OPENBLAS_NUM_THREADS``);
whatever else does is refused at start, so that it is noticed here and not in a hung rank.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing.util
import os
import select
import signal
import socket
import sys
import time

import setproctitle

from taas_magic import processes
from taas_magic.channel import Channel, ChannelClosedError, decoder_of
from taas_magic.rank import delivery, output, preload, rehearse
from taas_magic.wire import ToRank
from taas_magic.wire_data import (
    FromDataRank,
    FromNursery,
    FromProducer,
    StartDelivery,
    ToCoordinator,
    ToDataRank,
    ToDelivery,
    ToNursery,
    ToProducer,
)
from taas_magic.wire_zygote import ForkPreloaded, FromAgent, StartRun, ToAgent, ToRunZygote, ToZygote, Warm

#: What descends from here receives; each decoder takes a millisecond to build.
_MESSAGES = (
    ToRunZygote,
    FromAgent,
    ToAgent,
    ToRank,
    ToDelivery,
    ToCoordinator,
    ToNursery,
    FromNursery,
    ToProducer,
    FromProducer,
    FromDataRank,
    ToDataRank,
)


def main() -> None:
    """Entry of ``python -m taas_magic.rank.zygote FD``."""
    started = time.monotonic()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setproctitle.setproctitle("taas: zygote")
    processes.become_subreaper()
    # While it imports, nothing else would tell it that the runner has gone.
    processes.die_with_parent(os.getppid())
    channel: Channel[ToZygote] = Channel(socket.socket(fileno=int(sys.argv[1])), ToZygote)
    os.set_inheritable(channel.fileno(), False)
    _import_what_ranks_use()
    num_gpus = _count_gpus()
    if num_gpus == 0:
        rehearse.install()  # every run of this machine rehearses; looking for what to replace takes milliseconds
    num_threads = processes.count_threads()
    if num_threads != 1:
        raise RuntimeError(f"the zygote has {num_threads} threads after its imports; forking from it would not be safe")
    # What C has in its buffers would be written by every rank.
    output.flush()
    # Objects that exist now are never collected in ranks: a collection would write into every shared page.
    gc.collect()
    gc.freeze()
    processes.outlive_parent()
    channel.send(Warm(num_gpus=num_gpus, seconds=time.monotonic() - started))
    _serve(channel)


def _import_what_ranks_use() -> None:
    import getpass  # noqa: F401

    import numpy.random  # noqa: F401
    import torch  # imported here so that no rank has to
    import torch.distributed
    import torch.nn.parallel
    import torch.optim.lr_scheduler
    import torch.utils.data  # noqa: F401

    import taas  # noqa: F401
    from taas_magic.data import coordinator, producer  # noqa: F401
    from taas_magic.rank import agent, entry, run_zygote  # noqa: F401
    from taas_magic.rank.shell import prepare_shell

    prepare_shell()
    entry.prepare()
    for messages in _MESSAGES:
        decoder_of(messages)
    # What imports registered for the end of this process is not for the ranks to run, eight times; but they have
    # to end their own child processes.
    atexit._clear()
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]


def _count_gpus() -> int:
    """Count CUDA devices in a fork: asking may initialise CUDA, after which nothing could be forked."""
    reader, writer = os.pipe()

    def count() -> None:
        import torch

        os.write(writer, b"%d" % torch.cuda.device_count())

    pid = processes.fork(count)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    return int(answer or b"0")


def _serve(channel: Channel[ToZygote]) -> None:
    watch = processes.ChildWatch()
    own: set[int] = set()
    preloaded = 0
    while True:
        while watch.fileno() in select.select([channel.fileno(), watch.fileno()], [], [])[0]:
            watch.clear()
            own.difference_update(pid for pid, _ in processes.reap())
            # Whoever else is a child here was left by a run zygote that something killed.
            processes.kill_descendants(spare=own)
        try:
            message, descriptors = channel.receive()
        except ChannelClosedError:
            processes.kill_descendants()
            return
        if isinstance(message, StartRun):
            own.add(_fork_run_zygote(channel, watch, descriptors[0]))
        elif isinstance(message, StartDelivery):
            own.add(_fork_delivery(channel, watch, descriptors[0]))
        else:
            if preloaded in own:
                # The runner has let go of it and has no run in it; it may be busy importing for seconds yet.
                os.kill(preloaded, signal.SIGKILL)
            preloaded = _fork_preloaded(channel, watch, message, descriptors[0])
            own.add(preloaded)


def _fork_run_zygote(channel: Channel[ToZygote], watch: processes.ChildWatch, control_fd: int) -> int:
    from taas_magic.rank import run_zygote

    def be_run_zygote() -> None:
        channel.close()
        watch.close()
        run_zygote.serve(socket.socket(fileno=control_fd))

    pid = processes.fork(be_run_zygote)
    os.close(control_fd)
    return pid


def _fork_delivery(channel: Channel[ToZygote], watch: processes.ChildWatch, control_fd: int) -> int:
    parent = os.getpid()

    def be_delivery() -> None:
        channel.close()
        watch.close()
        processes.die_with_parent(parent)
        delivery.serve(socket.socket(fileno=control_fd))

    pid = processes.fork(be_delivery)
    os.close(control_fd)
    return pid


def _fork_preloaded(
    channel: Channel[ToZygote], watch: processes.ChildWatch, order: ForkPreloaded, socket_fd: int
) -> int:
    parent = os.getpid()

    def be_zygote() -> None:
        channel.close()
        watch.close()
        processes.die_with_parent(parent)
        preload.serve_preloaded(Channel(socket.socket(fileno=socket_fd), ToZygote), order, _serve)

    pid = processes.fork(be_zygote)
    os.close(socket_fd)
    return pid


if __name__ == "__main__":
    main()
