"""What stands in for rank 0 in :mod:`unit.roundtrip`: a clean process that forks for each cell, like the zygote."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
import types
from typing import Any

import numpy as np
import pandas as pd
import torch

from taas_magic.namespace.pack import load_namespace
from taas_magic.namespace.track import Tracker

_IMPORTED_ONCE = np, pd
MAX_MESSAGE_BYTES = 1 << 17


def serve(requests: socket.socket) -> None:
    """Fork for each request, which is a parcel and a socket to talk about it, until the requests end."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps what is forked here
    requests.send(b"warm")
    while True:
        source, fds, _, _ = socket.recv_fds(requests, MAX_MESSAGE_BYTES, 16)
        if not fds:
            return
        talk_fd, *parcel_fds = fds
        if os.fork() == 0:
            requests.close()
            _run(source.decode(), parcel_fds, socket.socket(fileno=talk_fd))
        for fd in fds:
            os.close(fd)


def _run(source: str, parcel_fds: list[int], talk: socket.socket) -> None:
    try:
        _run_cell(source, parcel_fds, talk)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def _run_cell(source: str, parcel_fds: list[int], talk: socket.socket) -> None:
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    main: dict[str, Any] = module.__dict__
    received = load_namespace(parcel_fds, main)
    tracker = Tracker(received.common, main)
    error = ""
    try:
        exec(compile(source, "<cell>", "exec"), main)
    except Exception:
        error = traceback.format_exc()
    exclude: list[str] = []
    while True:
        extra = {"result": main["result"]} if "result" in main else {}
        home = tracker.pack_changes(extra, exclude)
        report = {
            "error": error,
            "not_home": [(item.path, item.reason) for item in home.not_home],
            "unwrapped": home.unwrapped,
        }
        socket.send_fds(talk, [json.dumps(report).encode()], [home.parcel.fd])
        home.parcel.close()
        answer = talk.recv(MAX_MESSAGE_BYTES)
        if not answer:
            return
        exclude = json.loads(answer)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
