"""What stands in for a kept rank in :mod:`unit.kept`: a process that runs one cell after the other."""

from __future__ import annotations

import json
import socket
import sys
import traceback
import types
from typing import Any

import numpy as np
import pandas as pd
from unit.forking import MAX_MESSAGE_BYTES, fork_for_each

from taas_magic.namespace.mirror import KeptNamespace
from taas_magic.namespace.pack import load_namespace
from taas_magic.namespace.track import Tracker

_IMPORTED_ONCE = np, pd


def be_rank(rank: bytes, _fds: list[int], talk: socket.socket) -> None:
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
        tracker = Tracker(kept.common, main) if rank == b"0" else None
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
    fork_for_each(be_rank)
