"""What stands in for a kept rank in :mod:`unit.kept`: a process that runs one cell after the other."""

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

from taas_magic.namespace.mirror import KeptNamespace
from taas_magic.namespace.pack import load_namespace
from taas_magic.namespace.track import Tracker

_IMPORTED_ONCE = np, pd
MAX_MESSAGE_BYTES = 1 << 17


def serve(requests: socket.socket) -> None:
    """Fork a rank for each request, which is a socket to talk with it, until the requests end."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps what is forked here
    requests.send(b"warm")
    while True:
        rank, fds, _, _ = socket.recv_fds(requests, 16, 1)
        if not fds:
            return
        if os.fork() == 0:
            requests.close()
            try:
                be_rank(socket.socket(fileno=fds[0]), is_rank_0=rank == b"0")
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        os.close(fds[0])


def be_rank(talk: socket.socket, *, is_rank_0: bool) -> None:
    """Run cells until there are none."""
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    main: dict[str, Any] = module.__dict__
    kept: KeptNamespace | None = None
    while True:
        source, fds, _, _ = socket.recv_fds(talk, MAX_MESSAGE_BYTES, 16)
        if not fds:
            return
        if kept is None:
            kept = KeptNamespace(load_namespace(fds, main).common, main)
        else:
            kept.load(fds, lambda state: None)
        error = ""
        tracker = Tracker(kept.common, main) if is_rank_0 else None
        try:
            exec(compile(source.decode(), "<cell>", "exec"), main)
        except Exception:
            error = traceback.format_exc()
        report: dict[str, Any] = {"error": error, "not_home": []}
        if tracker is None:
            talk.send(json.dumps(report).encode())
        else:
            home = tracker.pack_changes(keep=True)
            kept.pending = home.sent
            report["not_home"] = [(item.path, item.reason) for item in home.not_home]
            socket.send_fds(talk, [json.dumps(report).encode()], [home.parcel.fd])
            home.parcel.close()
            del home, tracker
        adoptions = talk.recv(MAX_MESSAGE_BYTES)
        talk.send(json.dumps(kept.settle(adoptions[1:], home_taken=True)).encode())


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
