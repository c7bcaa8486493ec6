"""A zygote with more imports: those that the notebook has made from installed packages.

It is a fork of the zygote, so that an import which makes forking unsafe (a thread, an initialised CUDA) costs that fork
and not the zygote. The project's own modules are never preloaded: they may be edited between two cells.
"""

from __future__ import annotations

import gc
import importlib
import sys
import time
import traceback
from collections.abc import Callable

import setproctitle

from taas_magic import processes
from taas_magic.channel import Channel
from taas_magic.namespace.process_state import set_environment
from taas_magic.wire_zygote import ForkPreloaded, Preloaded, PreloadRefused, ToZygote

_THREAD_END_S = 1.0


def serve_preloaded(
    channel: Channel[ToZygote], order: ForkPreloaded, serve: Callable[[Channel[ToZygote]], None]
) -> None:
    """Import what was ordered, then serve as a zygote; ends after telling the runner where an import is unfit."""
    setproctitle.setproctitle("taas: zygote (preloaded)")
    processes.become_subreaper()
    started = time.monotonic()
    # OpenBLAS has started already with the one thread it was given; libraries that bring their own must do so as well.
    set_environment({**order.environment, "OPENBLAS_NUM_THREADS": "1"})
    for name in order.modules:
        _import(name)
        reason = _why_unfit()
        if reason:
            channel.send(PreloadRefused(name, reason))
            return
    gc.collect()
    gc.freeze()
    channel.send(Preloaded(order.modules, time.monotonic() - started, sorted(sys.modules)))
    serve(channel)


def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    except BaseException:  # noqa: BLE001 - said where it matters
        # The ranks will meet the same error where the user sees it, if they import it at all.
        traceback.print_exc()


def _why_unfit() -> str:
    """Why this process must not be forked any more; "" where it may."""
    import torch

    deadline = time.monotonic() + _THREAD_END_S
    while processes.count_threads() > 1:
        if time.monotonic() > deadline:
            return "it starts a thread"
        time.sleep(0.01)
    return "it initialises CUDA" if torch.cuda.is_initialized() else ""
