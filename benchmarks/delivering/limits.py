"""What the machine itself does, as a program of its own: copies of blocks, and blocks over a bare socket."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from delivering.workloads import BLOCK_BYTES, memory_of, pace

#: As many blocks as there is memory for at first in a delivery of blocks of this size.
_NUM_TARGETS = 8
#: What our own sockets have (taas_magic/data/transports.py).
_BUFFER_BYTES = 4 * 2**20


def _copies() -> Iterator[None]:
    """One copy after the other into memory that has been touched."""
    source = memory_of(BLOCK_BYTES)
    targets = [np.ones(BLOCK_BYTES, np.uint8) for _ in range(_NUM_TARGETS)]
    while True:
        for target in targets:
            np.copyto(target, source)
            yield


def _pace_of_threads(num_threads: int, warm_s: float, window_s: float) -> float:
    rates: list[float] = []
    # numpy copies without the GIL.
    threads = [
        threading.Thread(target=lambda: rates.append(pace(_copies(), warm_s, window_s))) for _ in range(num_threads)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(rates)


def _received() -> Iterator[None]:
    """Blocks that another process sends, received into the same memory again and again."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        if not os.fork():
            with contextlib.suppress(OSError):
                _send(*server.getsockname())
            os._exit(0)
        connection, _ = server.accept()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    target = memoryview(bytearray(BLOCK_BYTES))
    with connection:
        while True:
            got = 0
            while got < BLOCK_BYTES:
                got += connection.recv_into(target[got:])
            yield


def _send(host: str, port: int) -> None:
    source = memory_of(BLOCK_BYTES)
    with socket.create_connection((host, port)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            connection.sendall(source)


def main() -> None:
    what, number, warm_s, window_s, out = sys.argv[1:]
    if what == "copy":
        rate = _pace_of_threads(int(number), float(warm_s), float(window_s))
    else:
        rate = pace(_received(), float(warm_s), float(window_s))
    Path(out).write_text(repr(rate), encoding="utf-8")


if __name__ == "__main__":
    main()
