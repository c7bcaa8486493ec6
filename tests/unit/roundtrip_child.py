"""What stands in for rank 0 in :mod:`unit.roundtrip`: a clean process that forks for each cell, like the zygote."""

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

from taas_magic.namespace.pack import load_namespace
from taas_magic.namespace.track import Tracker

_IMPORTED_ONCE = np, pd


def run_cell(source: bytes, parcel_fds: list[int], talk: socket.socket) -> None:
    """Run a cell, and send home what it did."""
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    main: dict[str, Any] = module.__dict__
    received = load_namespace(parcel_fds, main)
    tracker = Tracker(received.common, main)
    error = ""
    try:
        exec(compile(source.decode(), "<cell>", "exec"), main)
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
    fork_for_each(run_cell)
