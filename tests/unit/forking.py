"""A warm process that forks for each request: what the tests of namespaces have in the place of the zygote."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

MAX_MESSAGE_BYTES = 1 << 17
DEADLINE_S = 60.0


@contextlib.contextmanager
def warm_process(script: Path) -> Iterator[socket.socket]:
    """Start a script that calls :func:`fork_for_each`; yields the socket for requests, and ends the process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with ours:
        with theirs:
            fd = theirs.fileno()
            process = subprocess.Popen([sys.executable, str(script), str(fd)], pass_fds=(fd,), env=environment)
        try:
            ours.settimeout(DEADLINE_S)
            assert ours.recv(16) == b"warm"
            yield ours
        finally:
            ours.close()
            process.wait(DEADLINE_S)


def ask(requests: socket.socket, message: bytes, fds: list[int]) -> socket.socket:
    """Have the process fork; the socket that is returned leads to what it forked."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        socket.send_fds(requests, [message], [theirs.fileno(), *fds])
    ours.settimeout(DEADLINE_S)
    return ours


def fork_for_each(run: Callable[[bytes, list[int], socket.socket], None]) -> None:
    """Fork for each request until they end; ``run`` gets its message, its descriptors, and a socket to talk about it.

    The socket for requests is the process's argument.
    """
    requests = socket.socket(fileno=int(sys.argv[1]))
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps what is forked here
    requests.send(b"warm")
    while True:
        message, fds, _, _ = socket.recv_fds(requests, MAX_MESSAGE_BYTES, 16)
        if not fds:
            return
        if os.fork() == 0:
            requests.close()
            try:
                run(message, fds[1:], socket.socket(fileno=fds[0]))
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        for fd in fds:
            os.close(fd)
