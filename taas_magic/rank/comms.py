"""Lets widgets of a rank (``tqdm.notebook``, ipywidgets) show in the notebook: what they say goes to its front end.

One way only: a widget shows what the cell does, but a click on it does not reach the rank.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import comm
from comm.base_comm import BaseComm

from taas_magic.wire import DisplayKind

#: Sends a message to the runner: kind ("comm") and JSON content.
Send = Callable[[DisplayKind, bytes], None]


def install(send: Send) -> None:
    """Make ``comm.create_comm`` produce comms that speak to the notebook's front end."""

    class RankComm(BaseComm):
        """A comm whose messages travel with the rank's output."""

        def publish_msg(
            self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **keys: Any
        ) -> None:
            """See the base class."""
            content = {
                "msg_type": msg_type,
                "content": {"data": data or {}, "comm_id": self.comm_id, **keys},
                "metadata": metadata or {},
                "buffers": [base64.b64encode(bytes(buffer)).decode("ascii") for buffer in buffers or ()],
            }
            send("comm", json.dumps(content, default=repr).encode())

    comm.create_comm = RankComm
